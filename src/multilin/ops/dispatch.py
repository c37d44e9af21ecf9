"""Which implementation of an op runs: the only place that looks at devices and installed packages for it."""

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
    is_slow: doctor warns when this is the best there is.
    """

    name: str
    compute: Callable[..., Any]
    device: str | None = None
    dtypes: tuple[torch.dtype, ...] | None = None
    reads: tuple[torch.dtype, ...] = ()
    why_not: Callable[[], str | None] = always_available
    is_slow: bool = False


class Op:
    """A named function with backends, the preferred first; the last one, the definition, takes everything."""

    def __init__(self, name: str, backends: list[Backend]) -> None:
        self.name = name
        self.backends = backends

    def backend_for(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Backend:
        """The first backend that computes in this type on this device of this machine."""
        for backend in self.backends:
            fits = backend.device in (None, device.type) and (backend.dtypes is None or dtype in backend.dtypes)
            if fits and backend.why_not() is None:
                return backend
        raise AssertionError(f"{self.name}: the reference takes everything")


def all_ops() -> dict[str, Op]:
    """Every op with a choice of backends, by name: found in the folders of `multilin.ops`."""
    import importlib
    import pkgutil

    import multilin.ops

    modules = (importlib.import_module(f"multilin.ops.{m.name}") for m in pkgutil.iter_modules(multilin.ops.__path__))
    return {op.name: op for module in modules for op in vars(module).values() if isinstance(op, Op)}
