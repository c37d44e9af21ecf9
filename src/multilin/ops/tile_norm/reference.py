"""The tile norm, computed straight from its equation."""

import torch
from torch import Tensor


def tile_norm(x: Tensor, tile: int, dtype: torch.dtype) -> Tensor:
    """See `multilin.ops.tile_norm`."""
    tiles = x.unflatten(-1, (-1, tile))
    wide = tiles.to(torch.promote_types(x.dtype, torch.float32))
    mean_square = wide.square().mean(dim=-1, keepdim=True)
    zero = mean_square == 0
    scale = mean_square.masked_fill(zero, 1.0).rsqrt().masked_fill(zero, 0.0)
    scale = scale.masked_fill(mean_square == torch.inf, torch.nan)
    return (wide * scale).to(dtype).flatten(-2)
