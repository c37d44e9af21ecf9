"""Normalisation without parameters, of vectors and of gradients."""

import torch
from torch import Tensor, nn

from multilin.ops.dispatch import result_dtype
from multilin.ops.tile_norm import tile_norm


class TileNorm(nn.Module):
    """x divided by its root mean square over each tile of the last axis; a zero tile and its gradient stay 0.

    Args:
        tile: width of a tile; None is the whole vector.
        keeps_dtype: the result has the dtype of x also under autocast, for a gradient that half precision could not
            hold; otherwise it has the dtype of autocast, which matrix products read.
    """

    def __init__(self, tile: int | None = None, *, keeps_dtype: bool = False) -> None:
        super().__init__()
        self.tile, self.keeps_dtype = tile, keeps_dtype

    def forward(self, x: Tensor) -> Tensor:
        """Same shape as x."""
        return tile_norm(x, tile=self.tile, dtype=x.dtype if self.keeps_dtype else result_dtype(x))


def standardize(x: Tensor, eps: float) -> Tensor:
    """Mean 0 and standard deviation 1 over the last axis, with the divisor n - 1; eps is added to the deviation.

    In float32 or better; the result has the dtype of x.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    centred = wide - wide.mean(dim=-1, keepdim=True)
    return (centred / (centred.std(dim=-1, keepdim=True) + eps)).to(x.dtype)
