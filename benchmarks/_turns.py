"""Timing of several tasks in turns, so that a slow phase of the machine slows all of them."""

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
    """Seconds of each task in each turn, after one turn to warm up.

    Args:
        tasks: functions to time.
        turns: number of turns.
        clock: "wall", or "cpu" for the CPU time of this thread, which other programs hardly disturb; valid with one
            thread only.
        slow_turns: turns of a task that takes more than a second; None is the same as `turns`.
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
    """The results of each task in each turn, without the first `warm_up` turns."""
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
    """Tokens per second for `amount` tokens: median, fastest and slowest turn."""
    median = amount / statistics.median(seconds)
    return {"tokens_per_second": median, "fastest": amount / min(seconds), "slowest": amount / max(seconds)}


def seconds_of(task: Callable[[], object], now: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of a task, including its work on the accelerator."""
    synchronize()
    start = now()
    task()
    synchronize()
    return now() - start


def synchronize() -> None:
    """Wait for the accelerator, if there is one."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
