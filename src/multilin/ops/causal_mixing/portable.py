"""The causal mixing with one matrix for all rows where that is less work than a matrix of weights per row."""

from torch import Tensor

from multilin.ops.causal_mixing import reference
from multilin.ops.causal_mixing.state import CausalMixingState, read_inputs


def causal_mixing(
    x_BTD: Tensor,
    weights_NN: Tensor,
    positions_BT: Tensor,
    *,
    padding: Tensor | None = None,
    state: CausalMixingState | None = None,
) -> tuple[Tensor, Tensor]:
    """See `multilin.ops.causal_mixing`."""
    # Mixing every position costs n rows instead of T, but saves the weights' gathering, (B, T, n) numbers.
    if 4 * x_BTD.shape[1] < len(weights_NN):
        return reference.causal_mixing(x_BTD, weights_NN, positions_BT, padding=padding, state=state)
    inputs_BND = read_inputs(x_BTD, positions_BT, padding, state, len(weights_NN))
    mixed_BND = weights_NN.tril() @ inputs_BND
    return mixed_BND.gather(1, positions_BT.clamp(min=0)[..., None].expand_as(x_BTD)), inputs_BND
