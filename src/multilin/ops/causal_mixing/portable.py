"""Causal mixing with one matrix for all texts, or with some of its rows if few positions are read."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from multilin.ops.causal_mixing.reference import CausalMixingState, num_rows, read_inputs, unpack
from multilin.ops.ring import Ring

BLOCK = 512  # rows of a piece of the triangle: large enough for full-speed products


def causal_mixing(
    x_BTD: Tensor, triangle_P: Tensor, positions_BT: Tensor, *, padding: Tensor | None = None,
    state: CausalMixingState | None = None, product_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `multilin.ops.causal_mixing`."""
    num_time, num_positions = x_BTD.shape[1], num_rows(triangle_P)
    if state is None and padding is None and x_BTD.numel() and _counts_from_zero(positions_BT):
        weights_TT = unpack(triangle_P, num_time).to(product_dtype)
        inputs_BND = x_BTD if num_time == num_positions else pad(x_BTD, (0, 0, 0, num_positions - num_time))
        return multiply(weights_TT, x_BTD.to(product_dtype)), inputs_BND
    inputs_BND = read_inputs(x_BTD, positions_BT, padding, state, num_positions)
    # For more tokens, mixing all n positions instead of T is faster than gathering weights, (B, T, n) numbers.
    if 4 * num_time < num_positions:
        weights_BTN = rows(triangle_P, positions_BT, num_positions)
        return weights_BTN.to(product_dtype) @ inputs_BND.to(product_dtype), inputs_BND
    mixed_BND = unpack(triangle_P, num_positions).to(product_dtype) @ inputs_BND.to(product_dtype)
    return mixed_BND.gather(1, positions_BT.clamp(min=0)[..., None].expand_as(x_BTD)), inputs_BND


def from_ring(
    x_BTD: Tensor, triangle_P: Tensor, positions_BT: Tensor, ring: Ring, *, padding: Tensor | None,
    product_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return sums at a few new positions, which read new inputs and a ring (position i in slot i); and the new inputs.

    Each row may have padding at its end only.
    """
    if padding is not None:
        x_BTD = x_BTD.masked_fill(padding[..., None], 0.0)
    positions_BT = positions_BT.clamp(min=0)
    weights_BTS = gather_rows(triangle_P, positions_BT[..., None], ring.num_slots).to(product_dtype)
    weights_BTT = weights_BTS.gather(2, positions_BT[:, None, :].expand(-1, positions_BT.shape[1], -1))
    kept_BSD = ring.tokens.inputs_BND.to(product_dtype)
    return weights_BTS @ kept_BSD + weights_BTT @ x_BTD.to(product_dtype), x_BTD


def _counts_from_zero(positions_BT: Tensor) -> bool:
    """True if the positions of every row count from 0.

    The answer is always False while tracing, and on a GPU, where the check would wait for the GPU.
    """
    if torch.compiler.is_compiling() or positions_BT.device.type != "cpu":
        return False
    return bool((positions_BT == torch.arange(positions_BT.shape[1])).all())


def rows(triangle_P: Tensor, positions_BT: Tensor, size: int) -> Tensor:
    """For each position, its row of the (size, size) matrix: (B, T, size). Position -1 counts as 0."""
    row_BT1 = positions_BT.clamp(min=0)[..., None]
    # Whole rows are copied faster than single numbers, but need the matrix first.
    if 4 * positions_BT.numel() > size:
        return unpack(triangle_P, size)[row_BT1[..., 0]]
    return gather_rows(triangle_P, row_BT1, size)


def gather_rows(triangle_P: Tensor, row_BT1: Tensor, size: int) -> Tensor:
    """The given rows of the (size, size) matrix, (B, T, size), gathered number by number."""
    column_N = torch.arange(size, device=triangle_P.device)
    weights_BTN = triangle_P[(row_BT1 * (row_BT1 + 1) // 2 + column_N.minimum(row_BT1))]
    return weights_BTN.masked_fill(column_N > row_BT1, 0.0)


def multiply(weights_TT: Tensor, x_BTD: Tensor) -> Tensor:
    """sum_{j <= t} weights[t, j] x_j, in the common dtype of both; weights above the diagonal are not read.

    One product computes BLOCK rows for all texts, and reads only the columns up to the diagonal.
    """
    x_TN, parts = x_BTD.transpose(0, 1).flatten(1), weights_TT.split(BLOCK)
    ends = [min(first + BLOCK, len(x_TN)) for first in range(0, len(x_TN), BLOCK)]
    products = [part[:, :end].tril(end - len(part)) @ x_TN[:end] for part, end in zip(parts, ends, strict=True)]
    return torch.cat(products).unflatten(1, (len(x_BTD), -1)).transpose(0, 1)
