"""The weighted sum of all inputs so far with weights learned per pair of positions, as its equation."""

import torch
from torch import Tensor

from multilin.ops.causal_mixing.state import CausalMixingState, read_inputs
from multilin.ops.causal_mixing.triangle import num_rows, unpack


def causal_mixing(
    x_BTD: Tensor,
    triangle_P: Tensor,
    positions_BT: Tensor,
    *,
    padding: Tensor | None = None,
    state: CausalMixingState | None = None,
    product_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """See `multilin.ops.causal_mixing`; the bias is added there. Also gives all inputs read so far, (B, n, D)."""
    num_positions = num_rows(triangle_P)
    inputs_BND = read_inputs(x_BTD, positions_BT, padding, state, num_positions)
    weights_BTN = unpack(triangle_P, num_positions)[positions_BT.clamp(min=0)]
    mixed_BTD = torch.einsum("btn,bnd->btd", weights_BTN.to(product_dtype), inputs_BND.to(product_dtype))
    return mixed_BTD, inputs_BND
