"""Functions that run kernels, as operators of PyTorch: for gradients, torch.compile and other tracing."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter


def needs_gradients(*inputs: object) -> bool:
    """True if a backward pass may follow."""
    return torch.is_grad_enabled() and any([x.requires_grad for x in inputs if isinstance(x, Tensor)])  # noqa: C419 (faster)


def is_traced(*inputs: object) -> bool:
    """True if a graph is made of a call with these inputs, so that it must consist of known operators."""
    if torch.compiler.is_compiling():
        return True
    return any([type(x) is not Tensor and isinstance(x, Tensor) and type(x) is not Parameter for x in inputs])  # noqa: C419


def refuses_eager(*inputs: object, **options: object) -> str | None:
    """`Backend.refuses` of a special case for graphs."""
    return None if is_traced(*inputs) else "no graph is made of it"


class Operator:
    """An operator that is skipped if there is no gradient and no tracing: calling the function is faster.

    Its backward pass is that of `operator.register_autograd`.
    """

    def __init__(self, name: str, compute: Callable[..., Any], fake: Callable[..., Any]) -> None:
        self.compute = compute
        self.operator = torch.library.custom_op(f"multilin::{name}", compute, mutates_args=())
        self.operator.register_fake(fake)

    def __call__(self, *inputs: Any) -> Any:
        """The function's result."""
        return (self.operator if is_traced(*inputs) or needs_gradients(*inputs) else self.compute)(*inputs)


def operator(name: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Operator]:
    """A decorator that makes an operator `multilin::NAME` of a function of tensors.

    Args:
        name: of the operator.
        fake: function of the same arguments that returns empty tensors like the results.
    """
    return lambda compute: Operator(name, compute, fake)


def dense_rows(x: Tensor) -> Tensor:
    """The tensor itself if the numbers of its last axis are adjacent in memory, else a copy; for kernels."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
