"""Timing several tasks in turns, so that whatever slows the machine slows all of them."""

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

import torch

Key, Result = TypeVar("Key"), TypeVar("Result")


def seconds_in_turns(
    tasks: Mapping[Key, Callable[[], object]], turns: int, clock: str, *, slow_turns: int | None = None
) -> dict[Key, float]:
    """Median seconds of each task; see `times_in_turns`."""
    times = times_in_turns(tasks, turns, clock, slow_turns=slow_turns)
    return {key: statistics.median(seconds) for key, seconds in times.items()}


def times_in_turns(
    tasks: Mapping[Key, Callable[[], object]], turns: int, clock: str, *, slow_turns: int | None = None
) -> dict[Key, list[float]]:
    """Seconds of each task, turn after turn, after one turn that warms up.

    Args:
        tasks: functions to time.
        turns: how often each has its turn.
        clock: "wall", or "cpu" for the time this thread computes, which other programs hardly disturb; it is honest
            with one thread only.
        slow_turns: turns of a task that takes more than a second; None is as many as of the others.
    """
    now = time.perf_counter if clock == "wall" else time.thread_time

    def is_done(seconds: list[float]) -> bool:
        return slow_turns is not None and len(seconds) >= slow_turns and statistics.median(seconds) > 1

    return results_in_turns(
        {key: partial(seconds_of, task, now) for key, task in tasks.items()}, turns, is_done=is_done
    )


def results_in_turns(
    tasks: Mapping[Key, Callable[[], Result]],
    turns: int,
    warm_up: int = 1,
    is_done: Callable[[list[Result]], bool] = lambda results: False,
) -> dict[Key, list[Result]]:
    """The results of each task, turn after turn, without those of the first `warm_up` turns."""
    results: dict[Key, list[Result]] = {key: [] for key in tasks}
    for turn in range(warm_up + turns):
        for key, task in tasks.items():
            if is_done(results[key]):
                continue
            result = task()
            if turn >= warm_up:
                results[key].append(result)
    return results


def speeds(seconds: list[float], amount: float) -> dict[str, float]:
    """Tokens per second of so many tokens: the median of all turns, the fastest, and the slowest."""
    median = amount / statistics.median(seconds)
    return {"tokens_per_second": median, "fastest": amount / min(seconds), "slowest": amount / max(seconds)}


def seconds_of(task: Callable[[], object], now: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of a task, work on the accelerator included."""
    synchronize()
    start = now()
    task()
    synchronize()
    return now() - start


def synchronize() -> None:
    """Wait for the accelerator, if there is one."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
