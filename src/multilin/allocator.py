"""Keeping freed memory inside the process, for programs that allocate large tensors again and again.

glibc gives every tensor above 32 MB back to the system when it is freed, and every page of the next one costs a fault:
adding 1 to 64 MB takes 15 ms instead of 2.4, a training step up to 1.7 times as long. The command line switches
that off; a program that imports multilin keeps its own settings. MULTILIN_ALLOCATOR=system leaves everything as it is.
"""

import ctypes
import os
import platform
import sys

VARIABLE = "MULTILIN_ALLOCATOR"

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_MMAP_BYTES, _TRIM_BYTES = 2**30, 2**31 - 1


def why_not() -> str | None:
    """The reason why this process gives freed memory back to the system; None where it can keep it."""
    if os.environ.get(VARIABLE) == "system":
        return f"{VARIABLE}=system is set"
    if not sys.platform.startswith("linux") or platform.libc_ver()[0] != "glibc":
        return "the allocator is not glibc's"
    return None


def keep_freed_memory() -> None:
    """Ask glibc to keep up to 2 GB of freed memory, and blocks of up to 1 GB in it, unless there is a reason not to."""
    if why_not() is None:
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)
