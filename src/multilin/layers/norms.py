"""Normalisation without parameters."""

import torch
from torch import Tensor, nn


class TileNorm(nn.Module):
    """x divided by its root mean square over each tile of the last axis; a zero tile stays 0, and so does its gradient.

    Args:
        tile: width of a tile; None is the whole vector.
    """

    def __init__(self, tile: int | None = None) -> None:
        super().__init__()
        self.tile = tile

    def forward(self, x: Tensor) -> Tensor:
        """Same shape and dtype; the mean square is taken in float32 or better."""
        tiles = x.unflatten(-1, (-1, self.tile or x.shape[-1]))
        wide = tiles.to(torch.promote_types(x.dtype, torch.float32))
        mean_square = wide.square().mean(dim=-1, keepdim=True)
        zero = mean_square == 0
        scale = mean_square.masked_fill(zero, 1.0).rsqrt().masked_fill(zero, 0.0)
        return (wide * scale).to(x.dtype).flatten(-2)
