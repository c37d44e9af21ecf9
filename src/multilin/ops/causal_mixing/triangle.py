"""Lower-triangular matrices: from their rows one after the other, and times whole texts without their upper half."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from multilin.errors import InputError

BLOCK = 512  # rows of a piece of the triangle: large enough for full-speed products


def num_rows(triangle_P: Tensor) -> int:
    """n of a triangle of n (n + 1) / 2 weights.

    Raises:
        InputError: not such a number.
    """
    count = triangle_P.numel()
    size = (math.isqrt(8 * count + 1) - 1) // 2
    if triangle_P.ndim != 1 or size * (size + 1) // 2 != count:
        raise InputError(
            f"triangle: shape {tuple(triangle_P.shape)} given, but it must be (n (n + 1) / 2,) for a triangle of n rows"
        )
    return size


def unpack(triangle_P: Tensor, size: int) -> Tensor:
    """The matrix (size, size) with the first `size` rows of a triangle, zeros above."""
    is_read = torch.ones(size, size, dtype=torch.bool, device=triangle_P.device).tril()
    return triangle_P.new_zeros(size, size).masked_scatter(is_read, triangle_P[: size * (size + 1) // 2])


def rows(triangle_P: Tensor, positions_BT: Tensor, size: int) -> Tensor:
    """Row `position` of the (size, size) matrix for each position, (B, T, size); -1 counts as 0."""
    row_BT1 = positions_BT.clamp(min=0)[..., None]
    # Whole rows are copied faster than single numbers, but first the matrix has to be there.
    if 4 * positions_BT.numel() > size:
        return unpack(triangle_P, size)[row_BT1[..., 0]]
    column_N = torch.arange(size, device=triangle_P.device)
    weights_BTN = triangle_P[(row_BT1 * (row_BT1 + 1) // 2 + column_N.minimum(row_BT1))]
    return weights_BTN.masked_fill(column_N > row_BT1, 0.0)


def multiply(weights_TT: Tensor, x_BTD: Tensor) -> Tensor:
    """sum_{j <= t} weights[t, j] x_j, in the dtype of both; what is above the diagonal is not read."""
    mixed_BTD: Tensor = _Multiply.apply(weights_TT, x_BTD)
    return mixed_BTD


class _Multiply(torch.autograd.Function):
    """One product for every BLOCK rows with the columns that reach to their diagonal, all texts side by side."""

    @staticmethod
    def forward(ctx: Any, weights_TT: Tensor, x_BTD: Tensor) -> Tensor:
        x_TN = _side_by_side(x_BTD)
        ctx.save_for_backward(weights_TT, x_TN)
        mixed_TN = torch.empty_like(x_TN)
        for rows, columns in _blocks(len(weights_TT)):
            mixed_TN[rows] = weights_TT[rows, columns].tril(rows.start) @ x_TN[columns]
        return _one_by_one(mixed_TN, len(x_BTD))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *dmixed: Tensor) -> tuple[Tensor | None, Tensor | None]:
        weights_TT, x_TN = ctx.saved_tensors
        dmixed_TN, dx_TN, dweights_TT = _side_by_side(dmixed[0]), torch.empty_like(x_TN), torch.zeros_like(weights_TT)
        for rows, columns in _blocks(len(weights_TT)):
            dweights_TT[rows, columns] = (dmixed_TN[rows] @ x_TN[columns].t()).tril_(rows.start)
            # What the inputs of these rows go into: the columns below their diagonal.
            dx_TN[rows] = weights_TT[rows.start :, rows].tril().t() @ dmixed_TN[rows.start :]
        return dweights_TT, _one_by_one(dx_TN, len(dmixed[0]))


def _blocks(size: int) -> Iterator[tuple[slice, slice]]:
    """Rows of a piece, and the columns up to its last row."""
    for first in range(0, size, BLOCK):
        last = min(first + BLOCK, size)
        yield slice(first, last), slice(0, last)


def _side_by_side(x_BTD: Tensor) -> Tensor:
    """(T, B D)."""
    return x_BTD.transpose(0, 1).flatten(1)


def _one_by_one(x_TN: Tensor, num_batch: int) -> Tensor:
    return x_TN.unflatten(1, (num_batch, -1)).transpose(0, 1)
