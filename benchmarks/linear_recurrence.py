"""How close minGRU's recurrence comes to the speed of memory.

The limit copies as many bytes as the recurrence moves: three tensors (B, T, D) forward, nine with backward; a copy
of one moves two. Rows: ours (the preferred backend), the portable one, and the same with PyTorch's operators,
position after position. They take turns; the table shows medians.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks import _results
from benchmarks._turns import beside_a_copy
from multilin.analysis.machine import keep_freed_memory
from multilin.ops.linear_recurrence import LINEAR_RECURRENCE, portable, reference
from multilin.training.processes import accelerator_or_cpu as device

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
_KINDS = {"forward": 3, "backward": 9}  # tensors moved
SHAPES = ("16,256,384", "2,2048,512", "1,8192,512")


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks linear_recurrence", description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="B,T,D")
    parser.add_argument("--turns", type=int, default=7)
    arguments = _results.parse(parser, argv, clock=True)
    keep_freed_memory()
    ours = LINEAR_RECURRENCE.backend_for(device())
    print(f"ours is {ours.name}; {torch.get_num_threads()} threads, {arguments.clock} time")
    print(f"{'B,T,D':>14}{'type':>9}  {'':14}{'forward':>20}{'+ backward':>20}")
    rows = []
    for shape in arguments.shapes:
        for dtype in DTYPES:
            measured = _measure(tuple(map(int, shape.split(","))), DTYPES[dtype], arguments)
            for row in measured:
                figures = "".join(f"{row[f'{k}_ms']:11.2f} ms {row[f'{k}_over_limit']:5.2f}x" for k in _KINDS)
                print(f"{shape:>14}{dtype:>9}  {row['name']:14}{figures}", flush=True)
            rows += [{"shape": shape, "dtype": dtype, **row} for row in measured]
    _results.save("linear_recurrence", arguments, rows)


def _measure(shape: tuple[int, ...], dtype: torch.dtype, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    num_batch, num_time, width = shape
    inputs = torch.randn(num_batch, num_time, 2, width, device=device(), dtype=dtype, requires_grad=True)
    before, upstream = torch.zeros(num_batch, width, device=device()), torch.randn_like(inputs[:, :, 0])
    ours = LINEAR_RECURRENCE.backend_for(device(), dtype).compute
    ways: dict[str, Callable[[], Tensor]] = {
        "ours": lambda: ours(inputs, before, None)[0],
        "portable": lambda: portable.linear_recurrence(inputs, before, None)[0],
        "step by step": lambda: reference.linear_recurrence(inputs, before, None)[0],
    }
    return beside_a_copy(ways, [inputs], upstream, _KINDS, arguments.turns, arguments.clock)
