"""Rotary positions."""

import torch
from torch import Tensor

PAIR_BLOCK = 64  # pairs are (i, i + 32) inside blocks of 64, as TScale has them; narrower heads are one block


def rotate(x_BTHD: Tensor, positions_BT: Tensor, base: float) -> Tensor:
    """Turn pair number n of each head by position * base^(-2 n / D), so that products depend on distances only.

    Args:
        x_BTHD: (B, T, H, D) with D even, and a multiple of 64 above 64.
        positions_BT: (B, T) positions in the text.
        base: of the frequencies.
    """
    width = x_BTHD.shape[-1]
    block = min(PAIR_BLOCK, width)
    # In float64: an angle of a late position loses its fraction in float32.
    pair_P = torch.arange(width // 2, device=x_BTHD.device, dtype=torch.float64)
    angle_BTP = positions_BT[..., None].double() * base ** (-2 * pair_P / width)
    shape = (*positions_BT.shape, 1, width // block, block // 2)
    cos, sin = (part.to(x_BTHD.dtype).view(shape) for part in (angle_BTP.cos(), angle_BTP.sin()))
    first, second = x_BTHD.unflatten(-1, (-1, 2, block // 2)).unbind(dim=-2)
    return torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-2).flatten(-3)
