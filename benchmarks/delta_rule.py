"""The gated delta rule in chunks, beside the loop over tokens that defines it and the bare products that chunks are.

The limit are the products of the same shapes and number alone, the triangular systems counted as the products of their
matrices with the right-hand sides: eight forward, thirteen more backward. Two of each direction need the memory before,
or the gradient after, the chunk, so they run chunk after chunk, for all heads of one chunk at once; to run them for all
chunks at once, as the others, would be another computation. The peer is transformers' own rule in
chunks. "forward + backward" goes through autograd to all gradients. All of one size take turns in one process; the loop
has fewer turns.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from benchmarks import _results
from benchmarks._turns import seconds_in_turns
from multilin.analysis.machine import keep_freed_memory
from multilin.ops.delta_rule import DELTA_RULE, portable, reference
from multilin.training.processes import accelerator_or_cpu as device

Task = Callable[[], object]


def main(argv: list[str]) -> None:
    arguments = _results.parse(_parser(), argv, clock=True)
    keep_freed_memory()
    print(f"batch {arguments.batch}, {arguments.length} tokens, float32, {torch.get_num_threads()} threads, ", end="")
    print(f"{arguments.clock} time, milliseconds")
    rows = [row for direction in ("forward", "forward + backward") for row in _table(arguments, direction)]
    _results.save("delta_rule", arguments, rows)


def _table(arguments: argparse.Namespace, direction: str) -> list[dict[str, Any]]:
    print(direction)
    print(f"{'heads':>6}{'width':>6}{'ours':>9}{'limit':>9}{'over limit':>12}", end="")
    print(f"{'loop':>10}{'times faster':>14}{'peer':>9}{'times faster':>14}")
    rows = []
    for heads, width in arguments.sizes:
        tasks = _tasks(arguments, heads, width, direction != "forward")
        loop = {"loop": tasks.pop("loop")}
        seconds = seconds_in_turns(tasks, arguments.turns, arguments.clock)
        seconds |= seconds_in_turns(loop, arguments.loop_turns, arguments.clock)
        ms = {name: 1e3 * value for name, value in seconds.items()}
        ours = ms["ours"]
        print(f"{heads:>6}{width:>6}{ours:>9.1f}{ms['limit']:>9.1f}{ours / ms['limit']:>12.2f}", end="")
        print(f"{ms['loop']:>10.1f}{ms['loop'] / ours:>14.1f}{ms['peer']:>9.1f}{ms['peer'] / ours:>14.1f}", flush=True)
        rows.append({"direction": direction, "heads": heads, "width": width, "milliseconds": ms})
    return rows


def _tasks(arguments: argparse.Namespace, heads: int, width: int, with_backward: bool) -> dict[str, Task]:
    shape = (arguments.batch, arguments.length, heads)
    queries, keys, values = (torch.randn(*shape, width, device=device()) for _ in range(3))
    log_decays, rates = -0.1 * torch.rand(shape, device=device()), torch.rand(shape, device=device())
    memory = torch.zeros(arguments.batch, heads, width, width, device=device())
    tokens = (normalize(queries, dim=-1), normalize(keys, dim=-1), values, log_decays, rates)
    inputs = [x.requires_grad_(with_backward) for x in tokens]
    dread = torch.randn_like(values)
    tasks: dict[str, Callable[[], Tensor]] = {
        "ours": lambda: DELTA_RULE(*inputs, memory, dtype=torch.float32)[0],
        "loop": lambda: reference.delta_rule(*inputs, memory)[0],
        "peer": lambda: torch_chunk_gated_delta_rule(*inputs[:3], g=inputs[3], beta=inputs[4])[0],
    }
    limit = {"limit": _bare_products(arguments, heads, width, with_backward)}
    if not with_backward:
        return tasks | limit
    return limit | {
        name: lambda task=task: torch.autograd.grad(task(), inputs, dread)  # type: ignore[misc]
        for name, task in tasks.items()
    }


def _bare_products(arguments: argparse.Namespace, heads: int, width: int, with_backward: bool) -> Task:
    """Products of pairs of tokens, (C, width) by (width, C) and (C, C) by (C, width), and of tokens with memories."""
    chunk, num_rows = portable.CHUNK, arguments.batch * heads
    num_products = num_rows * (arguments.length // chunk)
    tokens, pairs = torch.randn(num_products, chunk, width), torch.randn(num_products, chunk, chunk)
    memories = torch.randn(num_products, width, width)
    tokens, pairs, memories = (x.to(device()) for x in (tokens, pairs, memories))
    one_by_one = list(zip(tokens.split(num_rows), memories.split(num_rows), strict=True))
    # Forward: scores and overlaps; two systems and what is read of the chunk; what queries read of the memory; and,
    # chunk after chunk, what keys read of it and its change. Backward: the gradients of these.
    num_overlaps, num_reads, num_memories, num_one_by_one = (4, 8, 5, 4) if with_backward else (2, 3, 1, 2)

    def run() -> None:
        for _ in range(num_overlaps):
            torch.bmm(tokens, tokens.mT)
        for _ in range(num_reads):
            torch.bmm(pairs, tokens)
        for _ in range(num_memories):
            torch.bmm(tokens, memories)
        for _ in range(num_one_by_one):
            for chunk_tokens, memory in one_by_one:
                torch.bmm(chunk_tokens, memory)

    return run


def _size(text: str) -> tuple[int, int]:
    heads, width = map(int, text.split("x"))
    return heads, width


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks delta_rule", description=__doc__)
    sizes = [(2, 64), (4, 64), (8, 64), (4, 128)]
    parser.add_argument("--sizes", type=_size, nargs="+", default=sizes, help="heads and their width, as 4x64")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a text")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--loop-turns", type=int, default=2, help="of the loop over tokens")
    return parser
