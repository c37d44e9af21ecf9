"""Choose the implementation of an op, here and nowhere else: by device, dtype, installed packages and arguments."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad

from multilin.errors import warn_once as warn_plainly
from multilin.ops.kernels import is_exported, why_no_numba, why_no_triton

CPU_DTYPES = (torch.float32, torch.bfloat16)
GPU_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Backend:
    """One implementation of an op."""

    name: str  # its name, as `multilin doctor` prints it
    compute: Callable[..., Any]  # same signature and result as the op's reference
    device: str | None = None  # device type of its tensors ("cpu", "cuda"); None for any
    dtypes: tuple[torch.dtype, ...] | None = None  # dtypes in which it computes; None for any
    why_not: Callable[[], str | None] = lambda: None  # why this machine cannot use it; None if it can
    # Why it does not take a call, None if it does; same arguments as `compute`.
    refuses: Callable[..., str | None] = lambda *arguments, **options: None

    def fits(self, device: torch.device, dtype: torch.dtype) -> bool:
        """True if the backend computes in this dtype on this device."""
        return (self.device is None or self.device == device.type) and (self.dtypes is None or dtype in self.dtypes)


def cpu_kernels(principle: str, compute: Callable[..., Any]) -> Backend:
    """A backend of kernels compiled by numba; `principle` describes the algorithm in a few words."""
    return Backend(f"numba ({principle})", compute, "cpu", CPU_DTYPES, why_not=why_no_numba)


def gpu_kernels(
    principle: str, compute: Callable[..., Any], refuses: Callable[..., str | None] = Backend.refuses
) -> Backend:
    """A backend of kernels compiled by Triton; `principle` describes the algorithm in a few words."""
    return Backend(f"triton ({principle})", compute, "cuda", GPU_DTYPES, why_not=why_no_triton, refuses=refuses)


def few_tokens(reference: Callable[..., Any], most: int, device: str | None = None) -> Backend:
    """A special case that uses the definition, which is fastest for at most `most` tokens."""

    def refuses(queries: torch.Tensor, *_: object, **options: object) -> str | None:
        return None if queries.shape[1] <= most else "there are many tokens"

    return Backend("reference (few tokens)", reference, device, refuses=refuses)


@dataclass
class Op:
    """A named function with backends in order of preference; the last backend, the definition, takes every call.

    Special cases are backends for a few calls only. They are tried first, and multilin does not warn if they refuse.
    """

    name: str
    backends: list[Backend]
    special_cases: Sequence[Backend] = ()

    def __call__(self, *arguments: Any, dtype: torch.dtype, **options: Any) -> Any:
        """Compute in this dtype, with the first backend that takes the call; the first of `arguments` is a tensor."""
        return self.backend_for(arguments[0].device, dtype, arguments, options).compute(*arguments, **options)

    def backend_for(
        self,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        arguments: tuple[Any, ...] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Backend:
        """The first backend that works with this dtype and device on this machine and takes the call.

        Without arguments, `refuses` is not consulted, and special cases are left out.

        Raises:
            RuntimeError: an argument has a forward-mode derivative, which kernels would silently ignore.
        """
        options = options or {}
        if arguments is not None:
            if _has_tangent(*arguments, *options.values()):
                raise RuntimeError(f"{self.name} has no forward-mode derivative; take the gradient instead")
            for special in self.special_cases:
                if special.fits(device, dtype) and special.refuses(*arguments, **options) is None:
                    return special
        refused = None
        for backend in self.backends:
            if not backend.fits(device, dtype) or backend.why_not() is not None:
                continue
            if backend.device is not None and is_exported():
                continue  # an exported graph is made of PyTorch's own operators
            reason = None if arguments is None else backend.refuses(*arguments, **options)
            if reason is not None:
                refused = refused or f"{self.name}: {backend.name} does not take this call, as {reason}"
                continue
            if refused is not None:
                warn_once(f"{refused}; {backend.name} runs instead, which may be many times slower")
            return backend
        raise AssertionError(f"{self.name}: the reference must take every call")


def _has_tangent(*inputs: Any) -> bool:
    """True if one of these tensors carries a forward-mode derivative."""
    if forward_ad._current_level < 0:
        return False
    return any(isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in inputs)


def result_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype of autocast on x's device, or without autocast the dtype of x; float64 stays float64, as in PyTorch."""
    device = x.device.type
    is_lowered = torch.is_autocast_enabled(device) and x.dtype != torch.float64
    return torch.get_autocast_dtype(device) if is_lowered else x.dtype


def can_read_values(tensor: torch.Tensor) -> bool:
    """True if a call may look at these values; False while the call is traced or captured as a CUDA graph."""
    return not torch.compiler.is_compiling() and not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


@torch.compiler.assume_constant_result
def warn_once(message: str) -> None:
    """Warn, but only once per process for each message, also while a graph is traced."""
    warn_plainly(message)


def all_ops() -> dict[str, Op]:
    """Every op that has several backends, by name, from the folders of `multilin.ops`."""
    import importlib
    import pkgutil

    from multilin import ops

    modules = (importlib.import_module(f"{ops.__name__}.{m.name}") for m in pkgutil.iter_modules(ops.__path__))
    return {op.name: op for module in modules for op in vars(module).values() if isinstance(op, Op)}
