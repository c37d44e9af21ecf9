"""Turning of pairs, as the equation."""

import torch
from torch import Tensor


def rotary(x_BTHD: Tensor, cos_BTP: Tensor, sin_BTP: Tensor, block: int) -> Tensor:
    """See `multilin.ops.rotary`."""
    cos, sin = (part[:, :, None].unflatten(-1, (-1, 1, block // 2)) for part in (cos_BTP, sin_BTP))
    pairs = x_BTHD.unflatten(-1, (-1, 2, block // 2))
    turned = pairs * cos + pairs.flip(-2) * torch.cat([-sin, sin], dim=-2)
    return turned.flatten(-3).to(x_BTHD.dtype)
