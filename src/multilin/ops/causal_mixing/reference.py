"""Causal mixing, computed straight from its equation: the weighted sum of all inputs so far."""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from multilin.errors import InputError
from multilin.ops.ring import Slots


class CausalMixingState(NamedTuple):
    """`inputs_BND`: the input of each position, 0 where none was read, in float32 or better. `num_read_B` is int64."""

    inputs_BND: Tensor
    num_read_B: Tensor

    @property
    def slots(self) -> Slots:
        """The inputs are a window of all n positions."""
        return Slots(("inputs_BND",), are_positions=True)


def causal_mixing(
    x_BTD: Tensor, triangle_P: Tensor, positions_BT: Tensor, *, padding: Tensor | None = None,
    state: CausalMixingState | None = None, product_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `multilin.ops.causal_mixing`, which adds the bias. Also returns all inputs read so far, (B, n, D)."""
    num_positions = num_rows(triangle_P)
    inputs_BND = read_inputs(x_BTD, positions_BT, padding, state, num_positions)
    weights_BTN = unpack(triangle_P, num_positions)[positions_BT.clamp(min=0)]
    mixed_BTD = torch.einsum("btn,bnd->btd", weights_BTN.to(product_dtype), inputs_BND.to(product_dtype))
    return mixed_BTD, inputs_BND


def read_inputs(
    x_BTD: Tensor, positions_BT: Tensor, padding_BT: Tensor | None, state: CausalMixingState | None, num_positions: int
) -> Tensor:
    """All inputs read so far, including the new inputs, each in the row of its position: (B, n, D)."""
    num_batch, _, width = x_BTD.shape
    if state is None:
        inputs_BND = x_BTD.new_zeros(num_batch, num_positions, width)
    else:
        inputs_BND = state.inputs_BND.to(x_BTD.dtype)
    rows_BT = positions_BT
    if padding_BT is not None:
        # A padded token goes to one more row, which is cut off.
        rows_BT = positions_BT.masked_fill(padding_BT, num_positions)
        inputs_BND = pad(inputs_BND, (0, 0, 0, 1))
    return inputs_BND.scatter(1, rows_BT[..., None].expand_as(x_BTD), x_BTD)[:, :num_positions]


def num_rows(triangle_P: Tensor) -> int:
    """The number of rows, n, of a triangle of n (n + 1) / 2 weights."""
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
