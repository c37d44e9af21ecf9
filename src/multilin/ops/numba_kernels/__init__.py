"""What kernels that numba compiles for the CPU have in common; numba itself is imported by the other files here."""

import importlib.util
import os

_IS_INSTALLED = importlib.util.find_spec("numba") is not None
_is_forked = False


def _after_fork() -> None:
    global _is_forked
    _is_forked = True


if hasattr(os, "register_at_fork"):
    # The threads of OpenMP do not survive a fork, and entering a parallel region then hangs or kills the process.
    os.register_at_fork(after_in_child=_after_fork)


def why_not() -> str | None:
    """The reason why this installation cannot use such kernels."""
    return None if _IS_INSTALLED else "numba is not installed"


def is_forked() -> bool:
    """Whether this process was forked, so that its kernels must not start threads."""
    return _is_forked
