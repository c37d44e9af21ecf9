"""Timing with a time limit for each part. A failure is recorded, and the other measurements continue."""

import statistics
import time
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch

from multilin.inference import torch_engine


class OutOfTime(Exception):
    """The time of the part is used up."""


class Clock:
    """Times tasks on the GPU within a number of seconds. A dry run only calls each task once."""

    def __init__(self, seconds: float, *, is_dry: bool) -> None:
        self.end = time.monotonic() + seconds
        self.is_dry = is_dry

    def check(self) -> None:
        """Raise OutOfTime if the time is used up."""
        if not self.is_dry and time.monotonic() > self.end:
            raise OutOfTime("not measured: the time of this part was used up")

    def milliseconds(self, task: Callable[[], object], *, at_most: float = 1.0) -> float | None:
        """Median over 30 runs or `at_most` seconds, after runs that compile and warm up; None in a dry run."""
        self.check()
        task()
        if self.is_dry:
            return None
        for _ in range(3):
            task()
        torch.cuda.synchronize()
        times, begin = [], time.monotonic()
        while len(times) < 30 and (len(times) < 3 or time.monotonic() - begin < at_most):
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            task()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop))
        return statistics.median(times)


def captured(task: Callable[[], object]) -> Callable[[], object] | None:
    """A replay of the task as one CUDA graph, without the time of the host; None if it cannot be captured."""
    try:
        return torch_engine.captured(task)
    except torch.cuda.OutOfMemoryError:
        raise
    except RuntimeError:
        return None


def attempt(work: Callable[[], dict[str, Any]], name: str | None = None) -> dict[str, Any]:
    """Figures, or one line about a failure, also printed under this name. Frees the memory afterwards."""
    begin = time.monotonic()
    try:
        figures = work()
    except Exception as error:  # whatever goes wrong in one measurement must not cost the others
        where = traceback.extract_tb(error.__traceback__)[-1]
        words = (str(error).strip().splitlines() or [""])[0]
        place = f"{where.filename.rpartition('/')[2]}:{where.lineno}"
        figures = {"failed": f"{type(error).__name__}: {words[:300]} ({place})"}
    if name is not None or "failed" in figures:
        print(f"  {name or 'all'}: {in_words(figures)}  [{time.monotonic() - begin:.0f} s]", flush=True)
    torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return figures


def in_words(figures: Any) -> str:
    """Figures by name as a line of text."""
    if isinstance(figures, dict):
        return ", ".join(f"{key} {in_words(value)}" for key, value in figures.items())
    if isinstance(figures, list):
        return " ".join(in_words(value) for value in figures)
    return f"{figures:.4g}" if isinstance(figures, float) else "not timed" if figures is None else str(figures)


@contextmanager
def kernels_of_the_gpu():
    """Inside, ops choose their GPU kernels for CPU tensors too; Triton's interpreter runs them."""
    from multilin.ops.dispatch import Op

    choose = Op.backend_for

    def backend_for(op: Op, device: Any, dtype: torch.dtype = torch.float32, *call: Any) -> Any:
        for backend in op.backends:
            if backend.device != "cpu" and (backend.dtypes is None or dtype in backend.dtypes):
                return backend
        return choose(op, device, dtype, *call)

    Op.backend_for = backend_for
    try:
        yield
    finally:
        Op.backend_for = choose
