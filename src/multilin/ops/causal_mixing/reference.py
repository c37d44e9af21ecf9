"""The weighted sum of all inputs so far with weights learned per pair of positions, as its equation."""

import torch
from torch import Tensor

from multilin.ops.causal_mixing.state import CausalMixingState, read_inputs


def causal_mixing(
    x_BTD: Tensor,
    weights_NN: Tensor,
    positions_BT: Tensor,
    *,
    padding: Tensor | None = None,
    state: CausalMixingState | None = None,
    product_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """See `multilin.ops.causal_mixing`; the bias is added there. Also gives all inputs read so far, (B, n, D)."""
    inputs_BND = read_inputs(x_BTD, positions_BT, padding, state, len(weights_NN))
    weights_BTN = weights_NN.tril()[positions_BT.clamp(min=0)]
    mixed_BTD = torch.einsum("btn,bnd->btd", weights_BTN.to(product_dtype), inputs_BND.to(product_dtype))
    return mixed_BTD, inputs_BND
