"""What the kernels of all ops have in common. Modules named cpu_* import numba and gpu_* triton; others import neither.

With TRITON_INTERPRET=1 in the environment before triton is imported, Triton runs its kernels in Python, on tensors of
the CPU too: that is how they are tested where there is no GPU. Dispatch never takes them for such tensors.
"""

import importlib
import importlib.util
import os
from typing import Any

import torch

_HAS_NUMBA = importlib.util.find_spec("numba") is not None
_HAS_TRITON = importlib.util.find_spec("triton") is not None
OLDEST = (8, 0)  # compute capability: before it there are no bf16 tensor cores
_PROCESS = os.getpid()


class LazyModule:
    """A module that is imported when one of its names is first read: numba and triton take long, or are missing."""

    def __init__(self, name: str) -> None:
        self._module = name

    def __getattr__(self, name: str) -> Any:
        value = getattr(importlib.import_module(self._module), name)
        setattr(self, name, value)  # found without this function from now on
        return value


def is_forked() -> bool:
    """True in a forked process, whose CPU kernels must not start threads.

    The threads of OpenMP do not survive a fork, and entering a parallel region then hangs or kills the process.
    """
    return os.getpid() != _PROCESS


def why_no_numba() -> str | None:
    """The reason why this installation cannot use CPU kernels, or None."""
    return None if _HAS_NUMBA else "numba is not installed"


@torch.compiler.assume_constant_result
def why_no_triton() -> str | None:
    """The reason why GPU kernels cannot run here, or None."""
    if not _HAS_TRITON:
        return "triton is not installed"
    if is_interpreted():
        return None
    if not torch.cuda.is_available():
        return "PyTorch sees no CUDA device"
    capability = torch.cuda.get_device_capability()
    if torch.version.hip is None and capability < OLDEST:
        return f"the GPU's compute capability is {capability[0]}.{capability[1]}, and 8.0 is needed"
    return None


def is_interpreted() -> bool:
    """True if GPU kernels run in Python, wherever their tensors are: correct, and very slow."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
