"""The state of a causal mixing: the inputs read so far, in as many rows as there will ever be."""

from typing import NamedTuple

import torch
from torch import Tensor


class CausalMixingState(NamedTuple):
    """inputs_BND: the input of each position, 0 where none was read; float32 or better. num_read_B: int64."""

    inputs_BND: Tensor
    num_read_B: Tensor

    slot_fields = ("inputs_BND",)
    slots_are_positions = True
    slots_are_multiplied = False


def read_inputs(
    x_BTD: Tensor, positions_BT: Tensor, padding_BT: Tensor | None, state: CausalMixingState | None, num_positions: int
) -> Tensor:
    """All inputs read so far, these included, each in the row of its position: (B, n, D)."""
    num_batch, _, width = x_BTD.shape
    if state is None:
        inputs_BND = x_BTD.new_zeros(num_batch, num_positions, width)
    else:
        inputs_BND = state.inputs_BND.to(x_BTD.dtype)
    rows_BT = positions_BT
    if padding_BT is not None:
        # A padded token goes to one more row, which is cut off.
        rows_BT = positions_BT.masked_fill(padding_BT, num_positions)
        inputs_BND = torch.nn.functional.pad(inputs_BND, (0, 0, 0, 1))
    return inputs_BND.scatter(1, rows_BT[..., None].expand_as(x_BTD), x_BTD)[:, :num_positions]
