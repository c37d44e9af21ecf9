"""Lower-triangular matrices: from their rows one after the other, and times whole texts without their upper half."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

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
    if triangle_P.device.type == "cpu" and not torch.compiler.is_compiling():
        matrix: Tensor = _Unpack.apply(triangle_P, size)
        return matrix
    in_rows, in_columns = torch.tril_indices(size, size, device=triangle_P.device)
    return triangle_P.new_zeros(size, size).index_put((in_rows, in_columns), triangle_P[: size * (size + 1) // 2])


def rows(triangle_P: Tensor, positions_BT: Tensor, size: int) -> Tensor:
    """Row `position` of the (size, size) matrix for each position, (B, T, size); -1 counts as 0."""
    last_BT1 = positions_BT.clamp(min=0)[..., None]
    # Whole rows are copied faster than single numbers, but first the matrix has to be there.
    if 4 * positions_BT.numel() > size:
        return unpack(triangle_P, size)[last_BT1[..., 0]]
    columns_N = torch.arange(size, device=triangle_P.device)
    is_above_BTN = columns_N > last_BT1
    places_BTN = (last_BT1 * (last_BT1 + 1) // 2 + columns_N).masked_fill(is_above_BTN, 0)
    return triangle_P[places_BTN].masked_fill(is_above_BTN, 0.0)


def multiply(weights_TT: Tensor, x_BTD: Tensor) -> Tensor:
    """sum_{j <= t} weights[t, j] x_j, in the dtype of both; what is above the diagonal is not read."""
    mixed_BTD: Tensor = _Multiply.apply(weights_TT, x_BTD)
    return mixed_BTD


class _Unpack(torch.autograd.Function):
    """Whole rows are copied; finding each number by its two indices takes five times as long."""

    @staticmethod
    def forward(ctx: Any, triangle_P: Tensor, size: int) -> Tensor:
        ctx.num_unread = triangle_P.numel() - size * (size + 1) // 2
        read_P = triangle_P[: size * (size + 1) // 2]
        return pad_sequence(read_P.split(list(range(1, size + 1))), batch_first=True)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *dmatrix: Tensor) -> tuple[Tensor, None]:
        parts = [row[: index + 1] for index, row in enumerate(dmatrix[0].unbind())]
        return torch.cat([*parts, dmatrix[0].new_zeros(ctx.num_unread)]), None


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
