"""Which implementation of an op runs: the only place that looks at devices and installed packages for it."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


def always_available() -> str | None:
    """No reason against a backend that needs nothing but PyTorch."""
    return None


@dataclass(frozen=True)
class Backend:
    """One way to compute an op.

    name: as `multilin doctor` prints it.
    compute: same signature and result as the op's reference.
    device: type of the tensors it takes ("cpu", "cuda"); None takes any.
    dtypes: what it computes in; None is any.
    reads: types of values that it takes as they are; others are converted to what it computes in.
    why_not: the reason this machine cannot use it, None when it can.
    refuses: the reason it does not take one call, told by what the op passes to `backend_for`; None when it does.
    is_slow: doctor warns when this is the best there is.
    """

    name: str
    compute: Callable[..., Any]
    device: str | None = None
    dtypes: tuple[torch.dtype, ...] | None = None
    reads: tuple[torch.dtype, ...] = ()
    why_not: Callable[[], str | None] = always_available
    refuses: Callable[..., str | None] | None = None
    is_slow: bool = False


class Op:
    """A named function with backends, the preferred first; the last one, the definition, takes everything."""

    def __init__(self, name: str, backends: list[Backend]) -> None:
        self.name = name
        self.backends = backends

    def backend_for(
        self, device: torch.device, dtype: torch.dtype = torch.float32, call: tuple[Any, ...] | None = None
    ) -> Backend:
        """The first backend that computes in this type on this device of this machine, and takes this call.

        Args:
            device: of the tensors.
            dtype: it computes in.
            call: what backends decide by whether they refuse it; None asks for no call in particular.
        """
        refused = None
        for backend in self.backends:
            fits = backend.device in (None, device.type) and (backend.dtypes is None or dtype in backend.dtypes)
            if not fits or backend.why_not() is not None:
                continue
            if call is not None and backend.refuses is not None and (reason := backend.refuses(*call)) is not None:
                refused = refused or f"{self.name}: {backend.name} does not take this call, as {reason}"
                continue
            if refused is not None:
                warn_once(f"{refused}; {backend.name} runs instead, which may be many times slower")
            return backend
        raise AssertionError(f"{self.name}: the reference takes everything")


_said: set[str] = set()


@torch.compiler.assume_constant_result
def warn_once(message: str) -> None:
    """Warn, but once per process for the same words; while a graph is traced too."""
    if message not in _said:
        _said.add(message)
        warnings.warn(message, stacklevel=4)


def all_ops() -> dict[str, Op]:
    """Every op with a choice of backends, by name: found in the folders of `multilin.ops`."""
    import importlib
    import pkgutil

    import multilin.ops

    modules = (importlib.import_module(f"multilin.ops.{m.name}") for m in pkgutil.iter_modules(multilin.ops.__path__))
    return {op.name: op for module in modules for op in vars(module).values() if isinstance(op, Op)}
