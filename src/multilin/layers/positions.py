"""Rotary positions."""

from typing import NamedTuple

import torch
from torch import Tensor

from multilin.ops.rotary import rotary

PAIR_BLOCK = 64  # pairs are (i, i + 32) inside blocks of 64, as TScale has them; narrower heads are one block


class Angles(NamedTuple):
    """Cosine and sine of the angle of each pair of numbers at each position, (B, T, D / 2) each."""

    cos_BTP: Tensor
    sin_BTP: Tensor


def rotary_angles(positions_BT: Tensor, width: int, base: float, dtype: torch.dtype) -> Angles:
    """Cosine and sine of position * base^(-2 n / D) for pair number n.

    Args:
        positions_BT: (B, T) positions in the text.
        width: D, the width of a head.
        base: base of the frequencies.
        dtype: of the vectors to rotate; the result is in float32 or better.
    """
    # In float64: an angle of a late position loses its fraction in float32.
    pair_P = torch.arange(width // 2, device=positions_BT.device, dtype=torch.float64)
    angle_BTP = positions_BT[..., None].double() * base ** (-2 * pair_P / width)
    wide = torch.promote_types(dtype, torch.float32)
    return Angles(angle_BTP.cos().to(wide), angle_BTP.sin().to(wide))


def rotate(x_BTHD: Tensor, angles: Angles) -> Tensor:
    """Rotate the pairs of each head by the angles, so that products of two positions depend on their distance only.

    Args:
        x_BTHD: (B, T, H, D) with D even, and a multiple of 64 above 64.
        angles: those of `rotary_angles` for these positions and this width.
    """
    return rotary(x_BTHD, *angles, block=min(PAIR_BLOCK, x_BTHD.shape[-1]))
