"""Int8 products, computed straight from the equation."""

import torch
from torch import Tensor


def round_to_int8(x: Tensor, dim: int | None = None) -> tuple[Tensor, Tensor]:
    """The rounded integers, and their scales: one for the tensor, or one per row."""
    largest = x.abs().amax() if dim is None else x.abs().amax(dim=dim, keepdim=True)
    scale = largest / 127
    return torch.where(scale == 0, 0.0, x / scale).round(), scale


def int8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, factor: float = 1.0) -> Tensor:
    """See `multilin.ops.int8.int8_linear`. Computes in float64, which holds these integers exactly."""
    values, scale = round_to_int8(x.double(), dim=-1)
    weights, weight_scale = round_to_int8(weight.double())
    result = factor * scale * weight_scale * (values @ weights.T)
    return result if bias is None else result + bias.double()


def int8_block_outer(left: Tensor, right: Tensor, weight: Tensor, *, factor: float = 1.0) -> Tensor:
    """See `multilin.ops.int8.int8_block_outer`."""
    pairs = torch.einsum("...nk,...nj->...nkj", left.double(), right.double()).flatten(-3)
    return int8_linear(pairs, weight.flatten(1), factor=factor)
