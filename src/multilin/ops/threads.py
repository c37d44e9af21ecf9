"""Use only as many threads as there are cores that other programs leave free.

PyTorch's threads wait for each other many times in a step, and keep their cores busy while they wait. If a thread loses
its core to another program, all others wait, and a step takes several times as long; fewer threads are faster. Nothing
here imports PyTorch, and nothing changes outside of `following_load`.
"""

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SECONDS = 0.5  # time between two measurements of the load


class Load:
    """Measure how many of this process's cores other processes keep busy, between one call of `cores` and the next."""

    def __init__(self) -> None:
        self.begin, self._busy, self._own = time.monotonic(), busy_seconds(), own_seconds()

    def cores(self) -> float | None:
        """The mean number of busy cores since the last measurement; None without /proc/stat."""
        before = self.begin, self._busy, self._own
        self.begin, self._busy, self._own = time.monotonic(), busy_seconds(), own_seconds()
        if before[1] is None or self._busy is None or self.begin == before[0]:
            return None
        return max(0.0, (self._busy - before[1] - (self._own - before[2])) / (self.begin - before[0]))


_load: Load | None = None
_free: int | None = None
_most: int | None = None  # PyTorch's number of threads at the start


@contextlib.contextmanager
def following_load() -> Iterator[None]:
    """Context in which `adapt` and `free_cores` follow the load; afterwards PyTorch has its old number of threads."""
    global _load, _free, _most
    _load, _free, _most = Load(), None, None
    try:
        yield
    finally:
        if _most is not None:
            sys.modules["torch"].set_num_threads(_most)
        _load = _free = _most = None


def free_cores() -> int:
    """Cores that other programs leave free, measured every `SECONDS`; outside of `following_load`, all cores."""
    global _free
    if _load is not None and time.monotonic() - _load.begin >= SECONDS and (busy := _load.cores()) is not None:
        _free = max(1, available_cores() - round(busy))
    return _free or available_cores()


def adapt() -> None:
    """Give PyTorch one thread per free core; call this between two pieces of work."""
    global _most
    if _load is None:
        return
    torch: Any = sys.modules["torch"]
    _most = _most or torch.get_num_threads()
    if (threads := min(_most, free_cores())) != torch.get_num_threads():
        torch.set_num_threads(threads)


def available_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def busy_seconds() -> float | None:
    """CPU seconds of all processes on this process's cores since the machine started; None without /proc/stat."""
    try:
        lines = Path("/proc/stat").read_text().splitlines()
    except OSError:
        return None
    allowed = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    fields = [line.split() for line in lines if line.split(" ")[0] in allowed]
    # user, nice, system, (idle, iowait,) irq, softirq
    return sum(sum(int(line[place]) for place in (1, 2, 3, 6, 7)) for line in fields) / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """CPU seconds of this process and of its child processes that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
