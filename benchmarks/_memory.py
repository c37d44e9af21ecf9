"""The peak memory of a piece of work."""

import ctypes
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

_CLEAR, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


Result = TypeVar("Result")


def peak_bytes(work: Callable[[], Result]) -> tuple[Result, int | None]:
    """The result of `work`, and its peak memory in bytes above the memory held before.

    Without an accelerator, the memory of the process, which is known on Linux only; None elsewhere.
    """
    if torch.accelerator.is_available():
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        result = work()
        return result, torch.accelerator.max_memory_allocated() - before
    try:
        if platform.libc_ver()[0] == "glibc":
            ctypes.CDLL(None).malloc_trim(0)  # or freed memory would be used again, uncounted
        _CLEAR.write_text("5")
    except OSError:
        return work(), None
    before = resident_bytes()
    result = work()
    return result, max(_held("VmHWM", _STATUS) - before, 0)


def own_peak_bytes() -> int:
    """The peak resident memory of this process since its start, in bytes."""
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def resident_bytes(pid: int | None = None) -> int:
    """The resident memory of a process (this one without `pid`), in bytes; Linux only."""
    return _held("VmRSS", _STATUS if pid is None else Path(f"/proc/{pid}/status"))


def _held(name: str, status: Path) -> int:
    line = next(line for line in status.read_text().splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])
