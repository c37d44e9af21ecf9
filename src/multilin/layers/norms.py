"""Normalisation without parameters."""

import torch
from torch import Tensor, nn

from multilin.ops.tile_norm import tile_norm


class TileNorm(nn.Module):
    """x divided by its root mean square over each tile of the last axis; a zero tile stays 0, and so does its gradient.

    Args:
        tile: width of a tile; None is the whole vector.
        keeps_dtype: give the dtype of x also under autocast, for a gradient that half precision could not hold;
            otherwise autocast's, which matrix products read.
    """

    def __init__(self, tile: int | None = None, *, keeps_dtype: bool = False) -> None:
        super().__init__()
        self.tile, self.keeps_dtype = tile, keeps_dtype

    def forward(self, x: Tensor) -> Tensor:
        """Same shape as x."""
        device = x.device.type
        is_lowered = torch.is_autocast_enabled(device) and not self.keeps_dtype and x.dtype != torch.float64
        return tile_norm(x, tile=self.tile, dtype=torch.get_autocast_dtype(device) if is_lowered else x.dtype)


def standardize(x: Tensor, eps: float) -> Tensor:
    """Mean 0 and standard deviation 1 over the last axis, with the divisor n - 1; eps is added to the deviation.

    In float32 or better; the result has the dtype of x.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    centred = wide - wide.mean(dim=-1, keepdim=True)
    return (centred / (centred.std(dim=-1, keepdim=True) + eps)).to(x.dtype)
