"""Time per token of attention to a window, for longer and longer texts, beside full attention and the limit.

The peer is PyTorch's `scaled_dot_product_attention` over the whole past, of the same widths; the limit are the bare
products of blocks of queries with the two blocks of keys and values that a window of their size can reach. "forward +
backward" goes through autograd to the gradients of queries, keys and values. All of one length take turns in one
process. bf16 means inputs as autocast makes them.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import _results
from benchmarks._turns import repeated, seconds_in_turns
from multilin.analysis.machine import keep_freed_memory
from multilin.ops.windowed_attention import windowed_attention
from multilin.training.processes import accelerator_or_cpu as device

Task = Callable[[], object]

TOKENS_PER_TURN = 8192


def main(argv: list[str]) -> None:
    arguments = _results.parse(_parser(), argv, clock=True)
    keep_freed_memory()
    sizes = f"window {arguments.window}, batch {arguments.batch}, {arguments.heads} heads of {arguments.width}"
    print(f"{sizes}, {torch.get_num_threads()} threads, {arguments.clock} time")
    rows = [
        row
        for dtype in arguments.dtypes
        for direction in ("forward", "forward + backward")
        for row in _table(arguments, dtype, direction)
    ]
    _results.save("windowed_attention", arguments, rows)


def _table(arguments: argparse.Namespace, dtype: str, direction: str) -> list[dict[str, Any]]:
    print(f"{dtype}, {direction}: microseconds per token")
    print(f"{'tokens':>8}{'ours':>9}{'over shortest':>15}{'limit':>9}{'over limit':>12}{'peer':>9}{'times faster':>14}")
    rows, shortest = [], None
    for length in arguments.lengths:
        tasks = _tasks(
            arguments, length, getattr(torch, {"bf16": "bfloat16"}.get(dtype, dtype)), direction != "forward"
        )
        # Short texts are read several times in a turn: a turn of a few milliseconds begins with a cold cache.
        repeats = max(1, TOKENS_PER_TURN // (length * arguments.batch))
        seconds = seconds_in_turns(
            {name: repeated(task, repeats) for name, task in tasks.items()}, arguments.turns, arguments.clock
        )
        per_token = {name: 1e6 * value / (length * arguments.batch * repeats) for name, value in seconds.items()}
        ours, limit, peer = per_token["ours"], per_token["limit"], per_token.get("peer")
        shortest = shortest or ours
        line = f"{length:>8}{ours:>9.2f}{ours / shortest:>15.2f}{limit:>9.2f}{ours / limit:>12.2f}"
        print(line + ("" if peer is None else f"{peer:>9.2f}{peer / ours:>14.1f}"), flush=True)
        rows.append({"dtype": dtype, "direction": direction, "length": length, "microseconds_per_token": per_token})
    return rows


def _tasks(arguments: argparse.Namespace, length: int, dtype: torch.dtype, with_backward: bool) -> dict[str, Task]:
    shape = (arguments.batch, length, arguments.heads, arguments.width)
    inputs = [torch.randn(shape, device=device(), dtype=dtype, requires_grad=with_backward) for _ in range(3)]
    dmeans = torch.randn(shape, device=device(), dtype=dtype)

    def ours() -> Tensor:
        scale = arguments.width**-0.5
        return windowed_attention(*inputs, window=arguments.window, scale=scale, needs_state=False)[0]

    def peer() -> Tensor:
        by_head = (x.transpose(1, 2) for x in inputs)
        return scaled_dot_product_attention(*by_head, is_causal=True).transpose(1, 2)

    tasks = {"ours": ours, "limit": _bare_products(arguments, length, dtype)}
    if length <= arguments.longest_peer:
        tasks["peer"] = peer
    if not with_backward:
        return tasks
    return {
        # Two products forward, and two gradients for each of them.
        name: repeated(task, 3) if name == "limit" else lambda task=task: torch.autograd.grad(task(), inputs, dmeans)
        for name, task in tasks.items()
    }


def _bare_products(arguments: argparse.Namespace, length: int, dtype: torch.dtype) -> Task:
    """Blocks of queries by two blocks of keys, and by two blocks of values, over as many tokens, in the cache."""
    block = min(arguments.window, length)
    num_products = arguments.batch * arguments.heads * max(length // block, 1)
    group = min(num_products, 64)
    queries = torch.randn(group, block, arguments.width, device=device(), dtype=dtype)
    keys = torch.randn(group, arguments.width, 2 * block, device=device(), dtype=dtype)
    weights = torch.randn(group, block, 2 * block, device=device(), dtype=dtype)
    values = torch.randn(group, 2 * block, arguments.width, device=device(), dtype=dtype)

    def run() -> None:
        for _ in range(num_products // group):
            torch.bmm(queries, keys)
            torch.bmm(weights, values)

    return run


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks windowed_attention", description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2**power for power in range(10, 16)])
    parser.add_argument("--longest-peer", type=int, default=8192, help="longest text of the peer, in tokens")
    parser.add_argument("--window", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--width", type=int, default=64, help="of a head")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bf16"], choices=["float32", "bf16"])
    parser.add_argument("--turns", type=int, default=5)
    return parser
