"""Ops and models on a GPU in one call of at most 8 minutes: correctness first, then speed, as one JSON file.

limits    a large copy and large matrix products; the shares below refer to them.
checks    results and gradients of every op against float64.
poolings  ops that mix positions beside the portable path, SDPA, flex_attention and fla (GLA, retention, delta rule).
matrices  products of pairs and of int8 as shares of the matrix peak, beside the portable path.
decoding  milliseconds per token, bytes of state, growth of memory.
training  tokens per second and MFU of all architectures beside GPT-2 and Llama (SDPA, compiled), GLA and Mamba-2.

Each part has a share of the time. The result names what failed or was not reached, and the other parts continue. With
--dry nothing is timed: the same code runs the kernels at tiny shapes on the CPU, through Triton's interpreter.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from benchmarks import _machine, _results
from benchmarks._gpu_timing import Clock, attempt, kernels_of_the_gpu
from multilin.errors import InputError

SHARES = {"limits": 0.05, "checks": 0.1, "poolings": 0.25, "matrices": 0.15, "decoding": 0.1, "training": 0.35}
"""The share of the time of each part."""

TINY: dict[str, Any] = {
    "shapes": [(1, 19, 2, 16)], "check_shape": (1, 19, 2, 4), "rows": 9, "hidden_size": 16, "matrix_size": 32,
    "few_rows": 2,
    "copy_megabytes": 1, "parameters": [30e3], "hidden_sizes": [32], "lengths": [16], "tokens": 32, "vocab_size": 64,
    "batches": [1, 2], "read": 8, "steps": 2,
}  # fmt: skip
"""The sizes of a dry run."""

BY_NAME_ONLY = None if _machine.accelerator() != "none" else "there is no GPU; `--dry` checks the kernels without one"


def main(argv: list[str]) -> int:
    arguments = _results.parse(_parser(), argv)
    if arguments.dry:
        if os.environ.get("TRITON_INTERPRET") != "1":
            # Triton reads this when it is imported, which has happened by now: start a new process.
            command = [sys.executable, "-m", "benchmarks", "gpu", *argv]
            return subprocess.call(command, env={**os.environ, "TRITON_INTERPRET": "1"})
        vars(arguments).update(TINY)
    elif not torch.cuda.is_available():
        raise InputError("PyTorch sees no CUDA device; --dry checks the kernels on the CPU")
    if len(arguments.parameters) != len(arguments.hidden_sizes):
        raise InputError("--parameters and --hidden-sizes must be equally many")
    from benchmarks._gpu_models import models

    if unknown := set(arguments.models or ()).difference(models()):
        raise InputError(f"--models: no model {min(unknown)!r}; there are {', '.join(models())}")
    result = _run(arguments)
    if arguments.json:
        _results.save_json(arguments.json, {"name": "gpu", "arguments": vars(arguments)}, result)
    return 0 if _print(result, arguments) else 1


def _run(arguments: argparse.Namespace) -> dict[str, Any]:
    from benchmarks import _gpu_models, _gpu_ops

    torch.manual_seed(0)
    device = torch.device("cpu" if arguments.dry else "cuda")
    result: dict[str, Any] = {"timed": not arguments.dry, "limits": {}}
    parts: dict[str, Callable[[Clock], dict[str, Any]]] = {
        "limits": lambda clock: _gpu_ops.limits(clock, device, arguments),
        "checks": lambda clock: _gpu_ops.checks(clock, device, arguments),
        "poolings": lambda clock: _gpu_ops.poolings(clock, device, arguments, result["limits"]),
        "matrices": lambda clock: _gpu_ops.matrices(clock, device, arguments, result["limits"]),
        "decoding": lambda clock: _gpu_models.decoding(clock, device, arguments),
        "training": lambda clock: _gpu_models.training(clock, device, arguments, result["limits"]),
    }
    for name in arguments.parts:
        print(f"-- {name}", flush=True)
        clock = Clock(SHARES[name] * arguments.minutes * 60, is_dry=arguments.dry)
        # In a dry run models use the CPU kernels: the interpreter would take minutes.
        is_op = name in ("checks", "poolings", "matrices")
        with kernels_of_the_gpu() if arguments.dry and is_op else nullcontext():
            result[name] = attempt(partial(parts[name], clock), "all" if name == "limits" else None)
    return result


def _print(result: dict[str, Any], arguments: argparse.Namespace) -> bool:
    """Print a summary; True if every part ran and every check passed."""
    checked = [figures for figures in result.get("checks", {}).values() if isinstance(figures, dict)]
    wrong = sum(not figures.get("passed", False) for figures in checked)
    print(f"\n{len(checked)} checks against float64, {wrong} of them failed")
    parts = [result[part] for part in arguments.parts]
    has_failed = any("failed" in part for part in parts) or ("checks" in arguments.parts and not checked)
    if arguments.dry:
        print("A dry run: kernels were interpreted on the CPU, and nothing was timed.")
        entries = [entry for part in parts for entry in part.values() if isinstance(entry, dict)]
        has_failed |= any("failed" in entry for entry in entries)
    return not wrong and not has_failed


def _shape(text: str) -> tuple[int, ...]:
    shape = tuple(int(number) for number in text.split(","))
    if len(shape) != 4 or min(shape) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} given, but it must be four numbers from 1 on: B,T,H,D")
    return shape


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry", action="store_true", help="tiny shapes through the interpreter; times nothing")
    parser.add_argument("--minutes", type=float, default=8.0, help="of all parts together")
    parser.add_argument("--parts", nargs="+", choices=SHARES, default=list(SHARES))
    shapes = [(4, 2048, 16, 128), (1, 8192, 96, 128), (1, 131072, 16, 64)]
    parser.add_argument("--shapes", type=_shape, nargs="+", default=shapes, metavar="B,T,H,D")
    parser.add_argument("--check-shape", type=_shape, default=(2, 1031, 4, 64), metavar="B,T,H,D")
    parser.add_argument("--rows", type=int, default=16384, help="tokens of block_outer and int8_linear")
    parser.add_argument("--few-rows", type=int, default=64, help="the same, as while decoding")
    parser.add_argument("--hidden-size", type=int, default=2048, help="width of block_outer and int8_linear")
    parser.add_argument("--matrix-size", type=int, default=8192, help="of the products that give the peak")
    parser.add_argument("--copy-megabytes", type=int, default=2048, help="of the copy that gives the limit")
    parser.add_argument("--parameters", type=float, nargs="+", default=[125e6, 1.3e9], help="of the models")
    parser.add_argument("--hidden-sizes", type=int, nargs="+", default=[768, 2048], help="one per number of parameters")
    parser.add_argument("--models", nargs="+", metavar="NAME", help="that are trained and decoded; all, if not given")
    parser.add_argument("--vocab-size", type=int, default=32768)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192], help="tokens of a text in training")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of a training step")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64, 1024], help="texts decoded together")
    parser.add_argument("--read", type=int, default=512, help="tokens read before decoding")
    parser.add_argument("--steps", type=int, default=16, help="tokens decoded in one go")
    return parser
