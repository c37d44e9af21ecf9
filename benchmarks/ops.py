"""Times of the CPU ops beside the limits of the machine and other ways to the same result.

The limit of the running softmax mean and of minGRU's recurrence is a copy of the bytes that they move. The limit of
windowed attention and of the gated delta rule is their bare matrix products. Peers are the portable path, cumulative
sums (wrong after a large logit), PyTorch's attention to the whole past, and transformers' delta rule. All ways of one
shape take turns in one process. The table shows median milliseconds, and the factor over the limit.
"""

import argparse
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad, scaled_dot_product_attention
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from benchmarks import _results
from benchmarks._turns import seconds_in_turns
from multilin.analysis.machine import keep_freed_memory
from multilin.ops import delta_rule, linear_recurrence, prefix_softmax, windowed_attention
from multilin.ops.delta_rule import portable as delta_rule_portable
from multilin.ops.linear_recurrence import portable as linear_recurrence_portable
from multilin.ops.prefix_softmax import portable as prefix_softmax_portable
from multilin.training.processes import accelerator_or_cpu as device

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
KINDS = ("forward", "backward")
LONGEST_PEER = 8192  # most tokens for attention to the whole past

Task = Callable[[], object]


class Case(NamedTuple):
    """An op at one shape: ways to its result, the inputs that need gradients, and the limit of each kind."""

    ways: dict[str, Callable[[], Tensor]]
    inputs: list[Tensor]
    limits: tuple[Task, Task]


def main(argv: list[str]) -> None:
    arguments = _results.parse(_parser(), argv, clock=True)
    keep_freed_memory()
    print(f"{torch.get_num_threads()} threads, {arguments.clock} time, window {arguments.window} where an op has one")
    print(f"{'op':26}{'B,T,H,D':>15}{'type':>9}  {'':18}{'forward':>20}{'+ backward':>20}")
    rows = []
    for op, shape, dtype in ((op, s, d) for op in arguments.ops for s in arguments.shapes for d in arguments.dtypes):
        torch.manual_seed(0)
        case = OPS[op](tuple(map(int, shape.split(","))), DTYPES[dtype], arguments.window)
        for row in _measure(case, arguments):
            figures = "".join(f"{row[f'{k}_ms']:11.2f} ms {row[f'{k}_over_limit']:5.2f}x" for k in KINDS)
            print(f"{op:26}{shape:>15}{dtype:>9}  {row['name']:18}{figures}", flush=True)
            rows.append({"op": op, "shape": shape, "dtype": dtype, **row})
    _results.save("ops", arguments, rows)


def _measure(case: Case, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    upstream = torch.randn_like(case.ways["ours"]())

    def forward(way: Callable[[], Tensor]) -> None:
        with torch.no_grad():
            way()

    def backward(way: Callable[[], Tensor]) -> None:
        torch.autograd.grad(way(), case.inputs, upstream)

    tasks: dict[tuple[str, str], Task] = {}
    for kind, limit, run in zip(KINDS, case.limits, (forward, backward), strict=True):
        tasks[kind, "limit"] = limit
        tasks |= {(kind, name): partial(run, way) for name, way in case.ways.items()}
    seconds = seconds_in_turns(tasks, arguments.turns, arguments.clock, slow_turns=3)
    return [
        {"name": name}
        | {f"{kind}_ms": 1e3 * seconds[kind, name] for kind in KINDS}
        | {f"{kind}_over_limit": seconds[kind, name] / seconds[kind, "limit"] for kind in KINDS}
        for name in ("limit", *case.ways)
    ]


def _random(*shape: int, dtype: torch.dtype = torch.float32, needs_gradient: bool = True) -> Tensor:
    return torch.randn(shape, device=device(), dtype=dtype, requires_grad=needs_gradient)


def _copy(like: Tensor, moved: int) -> Task:
    """A copy that reads and writes the bytes of `moved` tensors of this size."""
    size = moved * like.numel() // 2
    return partial(like.new_empty(size).copy_, like.new_ones(size))


def _products(*pairs: tuple[Tensor, Tensor], times: int = 1) -> Task:
    def run() -> None:
        for _ in range(times):
            for left, right in pairs:
                torch.bmm(left, right)

    return run


def _running_mean(shape: tuple[int, ...], dtype: torch.dtype, window: int | None) -> Case:
    logits, values = _random(*shape[:3]), _random(*shape, dtype=dtype)
    options: dict[str, Any] = {"window": window, "needs_state": False}

    def cumulative_sums() -> Tensor:
        weights = torch.exp(logits - logits.amax(dim=1, keepdim=True))[..., None].to(dtype)
        above, below = (weights * values).cumsum(dim=1), weights.cumsum(dim=1)
        if window is not None and window < shape[1]:
            above, below = (x - pad(x[:, :-window], (0, 0, 0, 0, window, 0)) for x in (above, below))
        return above / below

    ways = {
        "ours": lambda: prefix_softmax.prefix_softmax(logits, values, **options)[0],
        "portable": lambda: prefix_softmax_portable.prefix_softmax(logits, values.float(), **options)[0].to(dtype),
        "cumulative sums": cumulative_sums,
    }
    return Case(ways, [logits, values], (_copy(values.detach(), 2), _copy(values.detach(), 6)))


def _recurrence(shape: tuple[int, ...], dtype: torch.dtype, window: int) -> Case:
    batch, length, width = *shape[:2], math.prod(shape[2:])
    inputs, before = _random(batch, length, 2, width, dtype=dtype), torch.zeros(batch, width, device=device())
    ours = linear_recurrence.LINEAR_RECURRENCE.backend_for(device(), dtype).compute
    ways: dict[str, Callable[[], Tensor]] = {
        "ours": lambda: ours(inputs, before, None)[0],
        "portable": lambda: linear_recurrence_portable.linear_recurrence(inputs, before, None)[0],
    }
    like = inputs.detach()[:, :, 0]
    return Case(ways, [inputs], (_copy(like, 3), _copy(like, 9)))


def _windowed_attention(shape: tuple[int, ...], dtype: torch.dtype, window: int) -> Case:
    batch, length, heads, width = shape
    inputs = [_random(*shape, dtype=dtype) for _ in range(3)]
    options: dict[str, Any] = {"window": window, "scale": width**-0.5, "needs_state": False}

    def whole_past() -> Tensor:
        by_head = (x.transpose(1, 2) for x in inputs)
        return scaled_dot_product_attention(*by_head, is_causal=True).transpose(1, 2)

    ways: dict[str, Callable[[], Tensor]] = {
        "ours": lambda: windowed_attention.windowed_attention(*inputs, **options)[0]
    }
    if length <= LONGEST_PEER:
        ways["whole past"] = whole_past
    # Each block of queries times the two blocks of keys, and of values, that its window reaches.
    block = min(window, length)
    number = batch * heads * max(length // block, 1)
    tokens = _random(number, block, width, dtype=dtype, needs_gradient=False)
    pairs = (tokens, tokens.mT.repeat(1, 1, 2)), (tokens @ tokens.mT.repeat(1, 1, 2), tokens.repeat(1, 2, 1))
    return Case(ways, inputs, (_products(*pairs), _products(*pairs, times=3)))  # two gradients for each product


def _delta_rule(shape: tuple[int, ...], dtype: torch.dtype, window: int) -> Case:
    batch, length, heads, width = shape
    queries, keys, values = (_random(*shape, needs_gradient=False) for _ in range(3))
    log_decays, rates = (torch.rand(shape[:3], device=device()) for _ in range(2))
    tokens = (normalize(queries, dim=-1), normalize(keys, dim=-1), values, -0.1 * log_decays, rates)
    inputs = [x.requires_grad_() for x in tokens]
    memory = torch.zeros(batch, heads, width, width, device=device())
    ways: dict[str, Callable[[], Tensor]] = {
        "ours": lambda: delta_rule.DELTA_RULE(*inputs, memory, dtype=dtype)[0],
        "transformers": lambda: torch_chunk_gated_delta_rule(*inputs[:3], g=inputs[3], beta=inputs[4])[0],
    }
    chunk, rows = delta_rule_portable.CHUNK, batch * heads
    number = rows * max(length // chunk, 1)
    chunks, pairs, memories = (
        _random(number, *sizes, needs_gradient=False) for sizes in ((chunk, width), (chunk, chunk), (width, width))
    )
    one_by_one = list(zip(chunks.split(rows), memories.split(rows), strict=True))

    def limit(overlaps: int, reads: int, of_memories: int, sequential: int) -> Task:
        """Products of tokens with tokens, pairs with tokens, and tokens with memories: together, then in sequence."""
        together = [(chunks, chunks.mT)] * overlaps + [(pairs, chunks)] * reads + [(chunks, memories)] * of_memories
        return _products(*together, *one_by_one * sequential)

    return Case(ways, inputs, (limit(2, 3, 1, 2), limit(4, 8, 5, 4)))


OPS: dict[str, Callable[..., Case]] = {
    "running mean": lambda shape, dtype, window: _running_mean(shape, dtype, None),
    "running mean in a window": _running_mean,
    "recurrence": _recurrence,
    "windowed attention": _windowed_attention,
    "delta rule": _delta_rule,
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks ops", description=__doc__)
    parser.add_argument("--ops", nargs="+", default=list(OPS), choices=OPS)
    parser.add_argument("--shapes", nargs="+", default=["2,2048,8,64", "1,8192,8,64"], metavar="B,T,H,D")
    parser.add_argument("--window", type=int, default=64, help="tokens of a window")
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--turns", type=int, default=7, help="turns of each; the table shows medians")
    return parser
