"""How close the running softmax mean comes to the speed of memory, and what other ways to compute it cost.

The limit is copying tensors of the shape of the values: 2 are moved forward (read, written), 6 forward and backward.
Rows: ours (the preferred backend), the portable one, the definition where it is feasible, and the difference of
cumulative sums, which is what one writes first, and is wrong after a large logit. All take turns in one process, with
the same allocator setting; the table shows medians, and ratios to the limit of the same run.
"""

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks import _plots, _results
from benchmarks._turns import beside_a_copy, seconds_in_turns
from multilin.analysis.machine import keep_freed_memory, why_not
from multilin.ops.prefix_softmax import PREFIX_SOFTMAX, portable, prefix_softmax, reference

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
SHAPES = ("8,2048,8,64", "2,2048,8,64", "1,16384,8,64")
FEASIBLE = 2**27  # numbers in the matrix of the definition, or in the windows of a comparison
MOVED = {"forward": 2, "backward": 6}  # tensors


def main(argv: list[str]) -> None:
    arguments = _results.parse(_parser(), argv, draws=True, threads=True)
    keep_freed_memory()
    backend = PREFIX_SOFTMAX.backend_for(torch.device("cpu"))
    freed = "kept" if why_not() is None else f"given back ({why_not()})"
    print(f"ours is {backend.name}; {torch.get_num_threads()} threads; freed memory is {freed}")
    print(f"{'B,T,H,D':>16}{'window':>8}{'type':>9}  {'':20}{'forward':>17}{'+ backward':>20}{'ours gains':>15}")
    rows = []
    for shape in arguments.shapes:
        for dtype in arguments.dtypes:
            for window in arguments.windows:
                measured = measure(tuple(map(int, shape.split(","))), window or None, DTYPES[dtype], arguments.turns)
                _print(measured, shape, window, dtype)
                rows += [{"shape": shape, "window": window, "dtype": dtype, **row} for row in measured]
            _print_spread(rows, shape, dtype)
    rows += [{"name": name, "microseconds": value} for name, value in one_token().items()]
    for name, seconds in first_calls().items():
        print(f"first call, {name}: {seconds:.2f} s after importing PyTorch and multilin")
        rows.append({"name": f"first call, {name}", "seconds": seconds})
    _results.save("prefix_softmax", arguments, rows, draw)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks prefix_softmax", description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="B,T,H,D")
    parser.add_argument("--windows", type=int, nargs="+", default=[0, 4, 16, 64, 256, 1024], help="0: the whole past")
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--turns", type=int, default=15, help="turns of each; the table shows medians")
    return parser


def cumulative_sums(logits: Tensor, values: Tensor, window: int | None) -> Tensor:
    """The means as a quotient of cumulative sums, of differences of them with a window."""
    weights = torch.exp(logits - logits.amax(dim=1, keepdim=True))[..., None].to(values.dtype)
    above, below = (weights * values).cumsum(dim=1), weights.cumsum(dim=1)
    if window is not None and window < values.shape[1]:
        shift = (0, 0, 0, 0, window, 0)
        above, below = (x - torch.nn.functional.pad(x[:, :-window], shift) for x in (above, below))
    return above / below


def measure(shape: tuple[int, ...], window: int | None, dtype: torch.dtype, turns: int) -> list[dict[str, Any]]:
    """Median milliseconds of every way, forward and forward with backward, the limit first."""
    torch.manual_seed(0)
    logits, values = torch.randn(shape[:3]).requires_grad_(), torch.randn(shape).to(dtype).requires_grad_()
    upstream = torch.randn(shape).to(dtype)
    options: dict[str, Any] = {"window": window, "needs_state": False}
    ways: dict[str, Callable[[], Tensor]] = {
        "ours": lambda: prefix_softmax(logits, values, **options)[0],
        "portable": lambda: portable.prefix_softmax(logits, values.float(), **options)[0].to(dtype),
        "cumulative sums": lambda: cumulative_sums(logits, values, window),
    }
    if shape[0] * shape[1] ** 2 * shape[2] <= FEASIBLE:
        ways["definition"] = lambda: reference.prefix_softmax(logits, values.float(), **options)[0].to(dtype)
    rows = beside_a_copy(ways, [logits, values], upstream, MOVED, turns, "wall", slow_turns=3)
    ours = next(row for row in rows if row["name"] == "ours")
    return [row | {f"{kind}_gain": row[f"{kind}_ms"] / ours[f"{kind}_ms"] for kind in MOVED} for row in rows]


def one_token() -> dict[str, float]:
    """Microseconds of a call with one token that reads on from a state, and of one with gradients."""
    logits, values = torch.randn(1, 1, 8), torch.randn(1, 1, 8, 64)
    _, state = prefix_softmax(logits, values)
    needed = logits.clone().requires_grad_()

    def decode() -> None:
        with torch.inference_mode():
            for _ in range(1000):
                prefix_softmax(logits, values, state=state)

    def train() -> None:
        for _ in range(1000):
            prefix_softmax(needed, values, needs_state=False)

    seconds = seconds_in_turns({"decode": decode, "for training": train}, 7, "wall")
    microseconds = {name: 1e3 * value for name, value in seconds.items()}
    print("one token, microseconds: " + ", ".join(f"{name} {value:.1f}" for name, value in microseconds.items()))
    return microseconds


def first_calls() -> dict[str, float]:
    """Seconds of the first call, forward and backward, of a new process: compiled before, and never compiled."""
    program = """
import time, torch, multilin.ops.prefix_softmax as op
logits, values = torch.randn(2, 2048, 8, requires_grad=True), torch.randn(2, 2048, 8, 64, requires_grad=True)
begin = time.perf_counter()
op.prefix_softmax(logits, values)[0].sum().backward()
print(time.perf_counter() - begin)
"""
    with tempfile.TemporaryDirectory() as folder:

        def call() -> float:
            environment = {**os.environ, "NUMBA_CACHE_DIR": folder}
            command = [sys.executable, "-W", "ignore", "-c", program]
            shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            return float(shown.stdout)

        return {"nothing compiled": call(), "from the cache": statistics.median(call() for _ in range(3))}


def _print(rows: list[dict[str, Any]], shape: str, window: int, dtype: str) -> None:
    for row in rows:
        place = f"{shape:>16}{window or 'none':>8}{dtype:>9}" if row is rows[0] else " " * 33
        figures = "".join(f"{row[f'{k}_ms']:9.2f} ms {row[f'{k}_over_limit']:5.2f}x" for k in ("forward", "backward"))
        gains = (
            "" if row["name"] in ("ours", "limit: copy") else f"{row['forward_gain']:8.1f}x{row['backward_gain']:6.1f}x"
        )
        print(f"{place}  {row['name']:20}{figures}{gains}", flush=True)


def draw(rows: _results.Rows, arguments: argparse.Namespace) -> "Figure":
    """Time over that of a copy for each window, ours and cumulative sums, a row of panels per dtype."""
    from matplotlib.ticker import LogLocator

    figure, panels = _plots.figure(len(arguments.dtypes), 2, height=3.6)
    longest = max(arguments.windows, default=1) or 1
    places = {window: window or 4 * longest for window in sorted(arguments.windows, key=lambda w: w or math.inf)}
    names = [f"{window:,}" if window else "whole\npast" for window in places]
    for axes, dtype in zip(panels, arguments.dtypes, strict=True):
        for axis, kind in zip(axes, ("forward", "backward"), strict=True):
            for name in ("cumulative sums", "ours"):
                for index, shape in enumerate(arguments.shapes):
                    own = [r for r in rows if (r.get("shape"), r.get("dtype"), r["name"]) == (shape, dtype, name)]
                    own.sort(key=lambda row: places[row["window"]])
                    x, y = [places[row["window"]] for row in own], [row[f"{kind}_over_limit"] for row in own]
                    shown = _plots.COLOURS[index % len(_plots.COLOURS)] if name == "ours" else _plots.PEER
                    label = shape.replace(",", "x") if name == "ours" else "" if index else "cumulative\nsums"
                    _plots.line(axis, x, y, label or "_", shown, _plots.MARKERS[index % len(_plots.MARKERS)])
            axis.set_yscale("log", subs=())
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.yaxis.set_major_formatter("{x:g}")
            _plots.scale_x(axis, list(places.values()), names)
            axis.axhline(1, color=_plots.PEER, linewidth=1)
            axis.set_title(f"{dtype}, {'forward' if kind == 'forward' else 'forward + backward'}", fontsize=10)
            _plots.name_ends(axis)
        axes[0].set_ylabel("time, in copies of the values")
    for axis in panels[-1]:
        axis.set_xlabel("window, in tokens; lines: B x T x H x D")
    return figure


def _print_spread(rows: list[dict[str, Any]], shape: str, dtype: str) -> None:
    ours = [r for r in rows if (r["shape"], r["dtype"], r["name"]) == (shape, dtype, "ours") and r["window"]]
    if len(ours) > 1:
        spread = (max(r[key] for r in ours) / min(r[key] for r in ours) for key in ("forward_ms", "backward_ms"))
        print(f"{'':35}ours, slowest over fastest window: " + " ".join(f"{s:.2f}x" for s in spread))
