"""A learned weight for every pair of positions: each position is a weighted sum of the inputs up to it."""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from multilin.errors import InputError
from multilin.ops.causal_mixing import portable, reference
from multilin.ops.causal_mixing.reference import CausalMixingState, num_rows, unpack
from multilin.ops.dispatch import Backend, Op, can_read_values, result_dtype
from multilin.ops.ring import Ring

__all__ = ["CAUSAL_MIXING", "CausalMixingState", "causal_mixing", "lower_triangle"]

CAUSAL_MIXING = Op(
    "causal_mixing",
    [
        Backend("portable (PyTorch, one matrix product)", portable.causal_mixing),
        Backend("reference (PyTorch, a matrix of weights per row)", reference.causal_mixing),
    ],
)


def causal_mixing(
    x: Float[Tensor, "B T D"],
    triangle: Float[Tensor, " P"],
    bias: Float[Tensor, " n"] | None = None,
    *,
    positions: Int[Tensor, "#B T"] | None = None,
    padding: Bool[Tensor, "B T"] | None = None,
    state: CausalMixingState | Ring | None = None,
    needs_state: bool = True,
) -> tuple[Float[Tensor, "B T D"], CausalMixingState | None]:
    """Sum the inputs of a text up to each position, with one learned weight for each pair of positions.

        y_t = sum_{j <= t} c[t, j] x_j + bias_t

    Args:
        x: (B, T, D) inputs.
        triangle: (n (n + 1) / 2,) the weights c row by row: c[0, 0], c[1, 0], c[1, 1], c[2, 0], ...; `lower_triangle`
            turns them into a matrix.
        bias: (n,) one number per position, added to all D numbers of the sum.
        positions: (B, T) or (1, T) position of each input in its text, from 0; None continues counting from the state.
        padding: (B, T) True at padding, which no position reads; the position of padding may be -1.
        state: the state that an earlier call returned; its inputs may lie in a ring (see `multilin.ops.ring`).
        needs_state: False if the text ends here: None is returned in place of the state.

    Returns:
        The sums (B, T, D) in the dtype of `x`, and the state: all inputs so far, always in n rows, in float32 (float64
        if an argument is float64). If `state` was a ring, the new state has only the new inputs.

    Raises:
        InputError: the number of weights is not n (n + 1) / 2 for any n, or a position is beyond n.

    Cost: O(B T^2 D) time for a text from its start, O(B n D) for each later token; the state has B n D numbers. A text
    has at most n tokens.
    Source: "Linear Language Models" (blbadger), masked mixers (arXiv 2409.01482).
    """
    num_positions = num_rows(triangle)
    if positions is None:
        # Positions continue from the state; a padded token repeats the position before it.
        is_token = torch.ones_like(x[..., 0], dtype=torch.bool) if padding is None else ~padding
        positions = is_token.cumsum(dim=1) - 1
        if state is not None:
            positions = positions + state.num_read_B[:, None]
    positions = positions.expand(x.shape[:2])
    is_checked = positions.numel() and can_read_values(positions)
    if is_checked and (length := int(positions.max()) + 1) > num_positions:
        raise InputError(f"context: the text has {length} positions, but there are weights for {num_positions}")
    dtype = torch.promote_types(torch.promote_types(x.dtype, triangle.dtype), torch.float32)
    wide = x.to(dtype)
    # Under autocast it multiplies half-precision numbers and sums in float32, like any product with weights.
    options: dict[str, Any] = {"padding": padding, "product_dtype": result_dtype(wide)}
    with torch.autocast(x.device.type, enabled=False):
        if isinstance(state, Ring):
            y, inputs = portable.from_ring(wide, triangle, positions, state, **options)
        else:
            y, inputs = CAUSAL_MIXING(wide, triangle, positions, state=state, dtype=dtype, **options)
        if bias is not None:
            y = y + bias.to(dtype)[positions.clamp(min=0)][..., None]
    if not needs_state:
        return y.to(x.dtype), None
    if x.shape[1]:
        num_read = positions[:, -1] + 1
    else:
        num_read = positions.new_zeros(len(x)) if state is None else state.num_read_B
    return y.to(x.dtype), CausalMixingState(inputs, num_read)


def lower_triangle(triangle: Float[Tensor, " P"]) -> Float[Tensor, "n n"]:
    """Return the matrix (n, n) with n (n + 1) / 2 weights in its lower triangle, row by row, and zeros above.

    Raises:
        InputError: the number of weights is not n (n + 1) / 2 for any n.
    """
    return unpack(triangle, num_rows(triangle))
