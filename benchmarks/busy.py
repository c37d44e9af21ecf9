"""What another program on one core costs: training, evaluation and decoding, with threads that make room and without.

A process that computes without end is started and ended for every turn of the busy machine. In each state of the
machine, quiet and busy, a fixed number of threads (PyTorch's and ONNX Runtime's own choice) and threads that follow the
load, as the command line has them, take turns on the same model. The limit of the busy machine is the quiet speed times
the cores' free share: the other program takes half of one core. The first half second of a turn, in which the load is
noticed, is not timed. Run it on a machine that does nothing else: what else runs is in all columns.
"""

import argparse
import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import _results
from benchmarks._engines import OurDecoder, make_decoder
from benchmarks._models import add_sizes, build, train_step
from multilin.analysis.machine import keep_freed_memory
from multilin.inference.onnx_engine import OnnxEngine
from multilin.ops.threads import SECONDS, adapt, following_load

LEAST_QUIET, LEAST_BUSY = 0.95, 2.5  # of the speed with a fixed number of threads
Work = Callable[[], int]


def main(argv: list[str]) -> None:
    arguments = _results.parse(_parser(), argv)
    keep_freed_memory()
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        works = _works(arguments, Path(folder))
        speeds: dict[tuple[str, str, str], list[float]] = {}
        for _ in range(arguments.turns):
            for state, program in (("quiet", contextlib.nullcontext), ("busy", _busy_core)):
                for name, work in works.items():
                    for kind, follow in (("fixed", contextlib.nullcontext), ("following", following_load)):
                        torch.set_num_threads(threads)
                        with program(), follow():
                            speeds.setdefault((name, state, kind), []).append(_speed(work, arguments.seconds))
    rows = [_row(name, {key[1:]: statistics.median(found) for key, found in speeds.items() if key[0] == name})
            for name in works]  # fmt: skip
    print(f"{threads} threads, tokens/s, median of {arguments.turns}; to reach: {LEAST_QUIET} quiet, {LEAST_BUSY} busy")
    beside = f"{'following':>12}{'ratio':>8}"
    print(f"{'':22}{'quiet: fixed':>14}{beside}{'busy: fixed':>14}{beside}{'limit':>10}{'share':>8}")
    for row in rows:
        row["busy_limit"] = row["quiet_fixed"] * (1 - 0.5 / threads)
        print(f"{row['work']:22}", end="")
        for state in ("quiet", "busy"):
            fixed, following, ratio = (row[f"{state}_{name}"] for name in ("fixed", "following", "ratio"))
            print(f"{fixed:14,.0f}{following:12,.0f}{ratio:8.2f}", end="")
        print(f"{row['busy_limit']:10,.0f}{row['busy_following'] / row['busy_limit']:8.2f}")
    _results.save("busy", arguments, rows)


def _row(name: str, speeds: dict[tuple[str, str], float]) -> dict[str, Any]:
    row: dict[str, Any] = {"work": name} | {f"{state}_{kind}": speed for (state, kind), speed in speeds.items()}
    return row | {f"{state}_ratio": speeds[state, "following"] / speeds[state, "fixed"] for state in ("quiet", "busy")}


@contextlib.contextmanager
def _busy_core() -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as program:
        try:
            yield
        finally:
            program.kill()


def _speed(work: Work, seconds: float) -> float:
    """Tokens per second, once the load was noticed."""
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        work()
    begin, tokens = time.perf_counter(), work()
    while (spent := time.perf_counter() - begin) < seconds:
        tokens += work()
    return tokens / spent


def _works(arguments: argparse.Namespace, folder: Path) -> dict[str, Work]:
    torch.manual_seed(0)
    model = build(arguments.model, arguments, arguments.n_positions)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    num_rows = max(1, arguments.tokens // arguments.n_positions)
    ids = torch.randint(arguments.vocab_size, (num_rows, arguments.n_positions))

    def train() -> int:
        adapt()
        train_step(model.train(), optimizer, ids)
        return ids.numel()

    def evaluate() -> int:
        adapt()
        model.eval()
        with torch.inference_mode():
            model.token_losses(ids)
        return ids.numel()

    eager = make_decoder(model, "torch", 0, folder)
    make_decoder(model, "onnx", 1, folder / "export")
    onnx = OurDecoder(OnnxEngine(folder / "export"))
    return {
        "training": train,
        "evaluation": evaluate,
        "decoding, PyTorch": _decoding(eager),
        "decoding, ONNX": _decoding(onnx),
    }


def _decoding(decoder: Any) -> Work:
    state = decoder.prefill([1] * 32)

    def decode() -> int:
        decoder.start(state, 1)(8)
        return 8

    return decode


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks busy", description=__doc__)
    parser.add_argument("--model", default="additive")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="timed seconds of a turn")
    parser.add_argument("--tokens", type=int, default=1024, help="in a batch of training and evaluation")
    add_sizes(parser, hidden_size=256, num_layers=6, num_heads=8, vocab_size=4096, n_positions=256)
    return parser
