"""Tensors as rows of numbers that are adjacent in memory, as kernels read them."""

from torch import Tensor


def dense_rows(x: Tensor) -> Tensor:
    """The tensor itself if the numbers of its last axis are adjacent in memory, else a copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def as_rows(x: Tensor) -> Tensor:
    """(..., D) as (rows, D) with dense rows; copied only if necessary."""
    return dense_rows(x.reshape(-1, x.shape[-1]))


def row_bytes(rows: Tensor) -> int:
    """Bytes from one row to the next."""
    return rows.stride(0) * rows.element_size()
