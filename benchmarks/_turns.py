"""Timing several tasks in turns, so that whatever slows the machine slows all of them."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

Key = TypeVar("Key")


def seconds_in_turns(tasks: Mapping[Key, Callable[[], object]], turns: int, clock: str) -> dict[Key, float]:
    """Median seconds of each task; see `times_in_turns`."""
    return {key: statistics.median(seconds) for key, seconds in times_in_turns(tasks, turns, clock).items()}


def times_in_turns(tasks: Mapping[Key, Callable[[], object]], turns: int, clock: str) -> dict[Key, list[float]]:
    """Seconds of each task, turn after turn, after one turn that warms up.

    Args:
        tasks: functions to time.
        turns: how often each has its turn.
        clock: "wall", or "cpu" for the time this thread computes, which other programs hardly disturb; it is honest
            with one thread only.
    """
    now = time.perf_counter if clock == "wall" else time.thread_time
    times: dict[Key, list[float]] = {key: [] for key in tasks}
    for turn in range(turns + 1):
        for key, task in tasks.items():
            synchronize()
            start = now()
            task()
            synchronize()
            if turn:
                times[key].append(now() - start)
    return times


def synchronize() -> None:
    """Wait for the accelerator, if there is one."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def device() -> torch.device:
    """The accelerator, or the CPU."""
    return torch.accelerator.current_accelerator() or torch.device("cpu")
