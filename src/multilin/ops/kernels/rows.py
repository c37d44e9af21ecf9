"""Tensors as kernels read them, and whether they are called as operators of PyTorch."""

import torch
from torch import Tensor


def dense_rows(x: Tensor) -> Tensor:
    """The tensor itself if the numbers of its last axis are adjacent in memory, else a copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def as_rows(x: Tensor) -> Tensor:
    """(..., D) as (rows, D), each row's numbers adjacent in memory; copied only if necessary."""
    return dense_rows(x.reshape(-1, x.shape[-1]))


def row_bytes(rows: Tensor) -> int:
    """Bytes from one row to the next."""
    return rows.stride(0) * rows.element_size()


def needs_gradients(*inputs: Tensor | None) -> bool:
    """True if a backward pass may follow."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)


def is_traced(*inputs: Tensor | None) -> bool:
    """True if a graph is made of the call, so that it must consist of known operators."""
    return torch.compiler.is_compiling() or any(type(x) not in _EAGER for x in inputs)


def can_skip_operator(*inputs: Tensor | None) -> bool:
    """True if there is no gradient and no tracing, so that the kernel can be called directly, which is faster."""
    return not needs_gradients(*inputs) and not is_traced(*inputs)


_EAGER = (Tensor, torch.nn.Parameter, type(None))
