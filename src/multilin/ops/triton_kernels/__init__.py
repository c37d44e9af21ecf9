"""What kernels that Triton compiles for a GPU have in common; triton itself is imported by the other files here.

With TRITON_INTERPRET=1 in the environment before triton is imported, Triton runs the same kernels in Python, on tensors
of the CPU too: that is how they are tested where there is no GPU. Dispatch never takes them for such tensors.
"""

import importlib.util
import os

import torch

_IS_INSTALLED = importlib.util.find_spec("triton") is not None
OLDEST = (8, 0)  # compute capability: before it there are no bf16 tensor cores


@torch.compiler.assume_constant_result
def why_not() -> str | None:
    """The reason why Triton's kernels cannot run here, or None."""
    if not _IS_INSTALLED:
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
    """Whether kernels run in Python, wherever their tensors are: correct, and very slow."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
