"""Rotation of pairs of numbers by angles, for rotary positions, in PyTorch: kernels would not make training faster."""

import torch
from jaxtyping import Float
from torch import Tensor

from multilin.errors import InputError

__all__ = ["rotary"]


def rotary(
    x: Float[Tensor, "B T H D"], cos: Float[Tensor, "B T P"], sin: Float[Tensor, "B T P"], *, block: int
) -> Float[Tensor, "B T H D"]:
    """Rotate each pair of numbers of every head by the angle of its position.

        y_i = x_i cos - x_j sin        y_j = x_i sin + x_j cos        j = i + block / 2, inside aligned blocks

    Args:
        x: (B, T, H, D) in any float dtype.
        cos, sin: (B, T, D / 2) cosines and sines of the angles, in the order of i, float32 or better, without gradient.
        block: an even divisor of D.

    Returns:
        (B, T, H, D) in the dtype of x.

    Raises:
        InputError: a block or shapes that do not fit.

    Cost: a few passes over x forward, and as many backward; only the angles are kept for the backward pass.
    Source: rotary positions of RoFormer, with pairs placed as in TScale.
    """
    width = x.shape[-1]
    if block < 2 or block % 2 or width % block:
        raise InputError(f"block: {block} given, but it must be even and divide the width, {width}")
    if cos.shape != (*x.shape[:2], width // 2) or sin.shape != cos.shape:
        raise InputError(f"cos: shape {tuple(cos.shape)} given for x {tuple(x.shape)}, but it must be (B, T, D / 2)")
    cos, sin = (part[:, :, None].unflatten(-1, (-1, 1, block // 2)) for part in (cos, sin))
    pairs = x.unflatten(-1, (-1, 2, block // 2))
    turned = pairs * cos + pairs.flip(-2) * torch.cat([-sin, sin], dim=-2)
    return turned.flatten(-3).to(x.dtype)
