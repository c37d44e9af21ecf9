"""The recurrence of minGRU: each channel of the state is a gated running average of candidates."""

from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from multilin.errors import InputError
from multilin.ops.dispatch import Backend, Op, cpu_kernels, gpu_kernels
from multilin.ops.linear_recurrence import operator, portable, reference
from multilin.ops.linear_recurrence.reference import linear_recurrence_weights
from multilin.ops.shapes import check_shapes

__all__ = ["LINEAR_RECURRENCE", "LinearRecurrenceState", "linear_recurrence", "linear_recurrence_weights"]

LINEAR_RECURRENCE = Op(
    "linear_recurrence",
    [
        cpu_kernels("compiled, one pass", partial(operator.linear_recurrence, "cpu")),
        gpu_kernels("compiled, scanned in chunks", partial(operator.linear_recurrence, "gpu")),
        Backend("portable (PyTorch, in chunks)", portable.linear_recurrence),
        Backend("reference (PyTorch, one position after the other)", reference.linear_recurrence),
    ],
)


class LinearRecurrenceState(NamedTuple):
    """h after the last token, in float32 (float64 if an input is)."""

    hidden_BD: Tensor


def linear_recurrence(
    inputs: Float[Tensor, "B T 2 D"],
    *,
    state: LinearRecurrenceState | None = None,
    starts: Bool[Tensor, "B T"] | None = None,
    padding: Bool[Tensor, "B T"] | None = None,
    needs_state: bool = True,
) -> tuple[Float[Tensor, "B T D"], LinearRecurrenceState | None]:
    """Compute the hidden states of a minimal GRU; h is 0 before the text.

        h_t = (1 - z_t) h_(t-1) + z_t g(u_t)        z_t = sigmoid(k_t)        g(u) = u + 0.5 for u >= 0, else sigmoid(u)

    The error does not grow with the text, because all terms are positive and 1 - z_t is computed as sigmoid(-k_t). In
    exact arithmetic, a running softmax mean with logits log z_t - sum_{s<=t} log(1 - z_s) is equal, but these logits
    rise with every token, until float32 cannot hold their differences.

    Args:
        inputs: (B, T, 2, D) k and u side by side, as one matrix product gives them; k may be -inf, so that z = 0.
        state: the state that an earlier call returned; h continues from it.
        starts: (B, T) True where a new text begins: h is 0 before it.
        padding: (B, T) True at padding, where h stays as it is.
        needs_state: False if the text ends here: None is returned in place of the state.

    Returns:
        The hidden states (B, T, D) in the dtype of `inputs`, and the state after the last token.

    Raises:
        InputError: inputs whose third axis is not of length 2.

    Cost: O(B T D) time: a forward pass over inputs and hidden states, a backward pass over these and their gradients.
    Source: "Were RNNs All We Needed?" (arXiv 2410.01201), minGRU with the continuous g of its appendix.
    """
    if inputs.ndim != 4 or inputs.shape[2] != 2:
        raise InputError(f"inputs: shape {tuple(inputs.shape)} given, but it must be (B, T, 2, D)")
    num_batch, num_time, _, width = inputs.shape
    hidden_BD = None if state is None else state.hidden_BD
    check_shapes(("state", hidden_BD, (num_batch, width)), ("starts", starts, (num_batch, num_time)))
    if padding is not None:
        inputs = inputs.masked_fill(padding[..., None, None], -torch.inf)  # z = 0 and g(u) = 0
    wide = torch.promote_types(inputs.dtype, torch.float32)
    before_BD = inputs.new_zeros(num_batch, width, dtype=wide) if hidden_BD is None else hidden_BD.to(wide)
    if inputs.numel():
        hidden_BTD, after_BD = LINEAR_RECURRENCE(inputs, before_BD, starts, dtype=inputs.dtype)
    else:
        hidden_BTD, after_BD = inputs[:, :, 0], before_BD
    return hidden_BTD, LinearRecurrenceState(after_BD) if needs_state else None
