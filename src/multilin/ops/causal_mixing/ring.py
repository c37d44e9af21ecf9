"""The causal mixing of a few new inputs beside those in a ring, where each lies in the slot of its position."""

import torch
from torch import Tensor

from multilin.ops.causal_mixing.portable import gather_rows
from multilin.ops.ring import Ring


def causal_mixing(
    x_BTD: Tensor, triangle_P: Tensor, positions_BT: Tensor, ring: Ring, *, padding: Tensor | None,
    product_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Sums (B, T, D) as `multilin.ops.causal_mixing` has them, and the new inputs; padding may follow a row's only."""
    if padding is not None:
        x_BTD = x_BTD.masked_fill(padding[..., None], 0.0)
    positions_BT = positions_BT.clamp(min=0)
    weights_BTS = gather_rows(triangle_P, positions_BT[..., None], ring.num_slots).to(product_dtype)
    weights_BTT = weights_BTS.gather(2, positions_BT[:, None, :].expand(-1, positions_BT.shape[1], -1))
    kept_BSD = ring.tokens.inputs_BND.to(product_dtype)
    return weights_BTS @ kept_BSD + weights_BTT @ x_BTD.to(product_dtype), x_BTD
