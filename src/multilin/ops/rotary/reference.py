"""Turning of pairs, as the equation."""

import torch
from torch import Tensor


def rotary(x_BTHD: Tensor, cos_BTP: Tensor, sin_BTP: Tensor, block: int) -> Tensor:
    """See `multilin.ops.rotary`."""
    cos, sin = (part[:, :, None].unflatten(-1, (-1, block // 2)) for part in (cos_BTP, sin_BTP))
    first, second = x_BTHD.unflatten(-1, (-1, 2, block // 2)).unbind(dim=-2)
    turned = torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-2)
    return turned.flatten(-3).to(x_BTHD.dtype)
