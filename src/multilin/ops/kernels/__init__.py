"""Code shared by the kernels of all ops. Modules named cpu_* import numba and gpu_* triton; others import neither.

If TRITON_INTERPRET=1 is in the environment before triton is imported, Triton runs its kernels in Python, also on CPU
tensors. Tests use this where there is no GPU. Dispatch never chooses them for CPU tensors.
"""

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

_HAS_NUMBA = importlib.util.find_spec("numba") is not None
_HAS_TRITON = importlib.util.find_spec("triton") is not None
MANY_NUMBERS = 2**26  # numbers of a piece of work, on devices that need large pieces
OLDEST = (8, 0)  # the lowest compute capability; older GPUs have no bf16 tensor cores
_PROCESS = os.getpid()


class LazyModule:
    """A module that is imported when one of its names is first read: numba and triton load slowly or may be missing."""

    def __init__(self, name: str) -> None:
        self._module = name

    def __getattr__(self, name: str) -> Any:
        value = getattr(importlib.import_module(self._module), name)
        setattr(self, name, value)  # found without this function from now on
        return value


def is_forked() -> bool:
    """True in a forked process, which has none of OpenMP's threads: a parallel loop would hang or kill the process."""
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
        return f"the GPU's compute capability is {capability[0]}.{capability[1]}, but 8.0 is needed"
    return None


def is_interpreted() -> bool:
    """True if Triton interprets GPU kernels in Python, for tensors on any device; this is correct, but very slow."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def needs_gradients(*inputs: object) -> bool:
    """True if a backward pass may follow."""
    return torch.is_grad_enabled() and any([x.requires_grad for x in inputs if isinstance(x, Tensor)])  # noqa: C419 (faster)


def refuse_second_derivative(name: str) -> None:
    """Fail in a backward pass that is to be differentiated again: the second derivative would lack a part.

    Raises:
        RuntimeError: the gradient is taken with create_graph=True.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(f"{name}: second derivatives are not supported; take the gradient without create_graph=True")


def is_traced(*inputs: object) -> bool:
    """True if a call with these inputs is traced: the graph must then consist of registered operators."""
    if torch.compiler.is_compiling():
        return True
    return any([type(x) is not Tensor and isinstance(x, Tensor) and type(x) is not Parameter for x in inputs])  # noqa: C419


def is_exported() -> bool:
    """True if torch.export traces a call, so that its graph must consist of PyTorch's own operators.

    PyTorch 2.11 also reports an export while it compiles. So a call that Dynamo traces never counts as an export, even
    if an export uses Dynamo (`strict=True`).
    """
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()


def refuses_eager(*inputs: object, **options: object) -> str | None:
    """`Backend.refuses` for a special case, which takes only traced calls."""
    return None if is_traced(*inputs) else "the call is not traced into a graph"


def _on_its_device(compute: Callable) -> Callable:
    """Wrap a function so that its first tensor's GPU is current: Triton starts kernels only on the current GPU."""

    @functools.wraps(compute)
    def compute_there(*inputs: Any) -> Any:
        device = next(x.device for x in inputs if isinstance(x, Tensor))
        if device.type != "cuda":
            return compute(*inputs)
        with torch.cuda.device(device):
            return compute(*inputs)

    return compute_there


class Operator:
    """The PyTorch operator `multilin::NAME` around a function; calls without gradients or tracing skip the operator."""

    def __init__(
        self, name: str, compute: Callable, fake: Callable, gradient: tuple[Callable, ...], changed: tuple[str, ...]
    ) -> None:
        self.compute = _on_its_device(compute)
        self.operator = torch.library.custom_op(f"multilin::{name}", self.compute, mutates_args=changed)
        self.operator.register_fake(fake)
        if gradient:
            self.operator.register_autograd(gradient[1], setup_context=gradient[0])

    def __call__(self, *inputs: Any) -> Any:
        """Return the function's result."""
        return (self.operator if is_traced(*inputs) or needs_gradients(*inputs) else self.compute)(*inputs)


def operator(
    name: str, fake: Callable[..., Any], *gradient: Callable[..., Any], changed: tuple[str, ...] = ()
) -> Callable[..., Operator]:
    """A decorator that turns a function of tensors into an operator, for gradients, torch.compile and other tracing.

    Args:
        name: the operator's name.
        fake: function of the same arguments that returns empty tensors with the shapes and dtypes of the results.
        gradient: the functions `setup_context` and `backward` of `torch.library.register_autograd`, if any.
        changed: names of the arguments that the function changes in place.
    """
    return lambda compute: Operator(name, compute, fake, gradient, changed)


def dense_rows(x: Tensor) -> Tensor:
    """For kernels: the tensor itself if the numbers of its last axis are adjacent in memory, else a copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
