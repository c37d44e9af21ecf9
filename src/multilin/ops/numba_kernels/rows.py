"""Tensors as rows that kernels read by address."""

import torch
from torch import Tensor


def as_rows(x: Tensor) -> Tensor:
    """(..., D) as (rows, D) whose numbers lie together; a copy only where they, or the rows, lie irregularly."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def place(rows: Tensor) -> tuple[int, int]:
    """Address, and bytes from one row to the next."""
    return rows.data_ptr(), rows.stride(0) * rows.element_size()


def runs_directly(*inputs: Tensor) -> bool:
    """Whether an operator would only cost time: no gradient is asked for, and nothing traces."""
    is_learning = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    return not is_learning and not torch.compiler.is_compiling() and all(type(x) is Tensor for x in inputs)
