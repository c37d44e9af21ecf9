"""The causal mixing with one matrix for all rows where that is less work than a matrix of weights per row."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from multilin.ops.causal_mixing import reference
from multilin.ops.causal_mixing.state import CausalMixingState, read_inputs
from multilin.ops.causal_mixing.triangle import multiply


def causal_mixing(
    x_BTD: Tensor,
    weights_NN: Tensor,
    positions_BT: Tensor,
    *,
    padding: Tensor | None = None,
    state: CausalMixingState | None = None,
    product_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """See `multilin.ops.causal_mixing`."""
    num_time, num_positions = x_BTD.shape[1], len(weights_NN)
    if state is None and padding is None and _counts_from_zero(positions_BT):
        weights_TT = weights_NN[:num_time, :num_time].to(product_dtype)
        inputs_BND = x_BTD if num_time == num_positions else pad(x_BTD, (0, 0, 0, num_positions - num_time))
        return multiply(weights_TT, x_BTD.to(product_dtype)), inputs_BND
    # Mixing every position costs n rows instead of T, but saves the weights' gathering, (B, T, n) numbers.
    if 4 * num_time < num_positions:
        return reference.causal_mixing(
            x_BTD, weights_NN, positions_BT, padding=padding, state=state, product_dtype=product_dtype
        )
    inputs_BND = read_inputs(x_BTD, positions_BT, padding, state, num_positions)
    mixed_BND = weights_NN.tril().to(product_dtype) @ inputs_BND.to(product_dtype)
    return mixed_BND.gather(1, positions_BT.clamp(min=0)[..., None].expand_as(x_BTD)), inputs_BND


def _counts_from_zero(positions_BT: Tensor) -> bool:
    """Whether every row is a text from its start. Not asked where a graph is traced, nor where asking means waiting."""
    if torch.compiler.is_compiling() or positions_BT.device.type != "cpu":
        return False
    return bool((positions_BT == torch.arange(positions_BT.shape[1])).all())
