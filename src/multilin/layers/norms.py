"""Normalisation without parameters."""

import torch
from torch import Tensor, nn

from multilin.ops.tile_norm import tile_norm


class TileNorm(nn.Module):
    """x divided by its root mean square over each tile of the last axis; a zero tile stays 0, and so does its gradient.

    Args:
        tile: width of a tile; None is the whole vector.
    """

    def __init__(self, tile: int | None = None) -> None:
        super().__init__()
        self.tile = tile

    def forward(self, x: Tensor) -> Tensor:
        """Same shape and dtype; under autocast in its dtype, which matrix products read."""
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        return tile_norm(x, tile=self.tile, dtype=dtype if x.dtype != torch.float64 else x.dtype)
