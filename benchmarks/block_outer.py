"""The rate of contracted block outer products beside the bare matrix product of the same size.

Shapes are those of 3Lin (hidden 512, blocks of 16), TScale (4 heads of 128, blocks of 4) and ELiTA (512 x 8). The limit
multiplies a ready-made matrix of as many pairs with the weight; backward it has the two products that gradients need.
Ours makes the pairs itself, a chunk at a time, and through autograd the gradients of both factors and of the weight.
"""

import argparse
from typing import Any

import torch

from benchmarks import _results
from benchmarks._turns import seconds_in_turns
from multilin.analysis.machine import keep_freed_memory
from multilin.ops.block_outer import block_outer
from multilin.training.processes import accelerator_or_cpu as device

SHAPES = {"3Lin": (32, 16, 16), "TScale": (128, 4, 4), "ELiTA": (1, 512, 8)}
"""Blocks, and the widths of both factors in a block, for a hidden size of 512."""


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks block_outer", description=__doc__)
    parser.add_argument("--rows", type=int, default=4096, help="tokens")
    parser.add_argument("--hidden-size", type=int, default=512, help="width of the result")
    parser.add_argument("--turns", type=int, default=5)
    arguments = _results.parse(parser, argv, clock=True)
    keep_freed_memory()
    print(
        f"{arguments.rows} rows to {arguments.hidden_size}, {torch.get_num_threads()} threads, {arguments.clock} time"
    )
    print(f"{'GFLOP/s':26}{'forward':>9}{'limit':>8}{'share':>8}{'+ backward':>13}{'limit':>8}{'share':>8}")
    rows = [_line(name, dtype, arguments) for dtype in ("float32", "bfloat16") for name in SHAPES]
    _results.save("block_outer", arguments, rows)


def _line(name: str, dtype_name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    num_blocks, left_width, right_width = shape = SHAPES[name]
    dtype = getattr(torch, dtype_name)
    rows, hidden_size = arguments.rows, arguments.hidden_size
    shapes = ((rows, num_blocks, left_width), (rows, num_blocks, right_width), (hidden_size, *shape))
    inputs = [torch.randn(size, device=device(), dtype=dtype, requires_grad=True) for size in shapes]
    num_pairs = num_blocks * left_width * right_width
    pairs = torch.randn(rows, num_pairs, device=device(), dtype=dtype)
    weight = inputs[2].detach().flatten(1)
    dresult = torch.randn(rows, hidden_size, device=device(), dtype=dtype)

    def forward() -> None:
        with torch.no_grad():
            block_outer(*inputs)

    tasks = {
        "forward": forward,
        "bare forward": lambda: pairs @ weight.T,
        "both": lambda: torch.autograd.grad(block_outer(*inputs), inputs, dresult),
        "bare both": lambda: (pairs @ weight.T, dresult @ weight, dresult.T @ pairs),
    }
    seconds = seconds_in_turns(tasks, arguments.turns, arguments.clock)
    once = 2 * rows * num_pairs * hidden_size / 1e9
    ours, limit = once / seconds["forward"], once / seconds["bare forward"]
    both, limit_both = 3 * once / seconds["both"], 3 * once / seconds["bare both"]
    shares = f"{ours:>9.0f}{limit:>8.0f}{ours / limit:>8.0%}{both:>13.0f}{limit_both:>8.0f}{both / limit_both:>8.0%}"
    print(f"{f'{name}, {dtype_name}':26}{shares}", flush=True)
    return {
        "name": name,
        "dtype": dtype_name,
        "shape": shape,
        "forward_gflops": ours,
        "forward_limit_gflops": limit,
        "forward_share": ours / limit,
        "both_gflops": both,
        "both_limit_gflops": limit_both,
        "both_share": both / limit_both,
    }
