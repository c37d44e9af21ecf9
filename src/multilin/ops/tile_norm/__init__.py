"""The tile norm, which divides each tile of a vector by the root mean square of the tile."""

import torch
from jaxtyping import Float
from torch import Tensor

from multilin.errors import InputError
from multilin.ops.dispatch import CPU_DTYPES, Backend, Op, cpu_kernels
from multilin.ops.kernels import is_exported
from multilin.ops.tile_norm import cpu, reference

__all__ = ["TILE_NORM", "tile_norm"]

TILE_NORM = Op(
    "tile_norm",
    [cpu_kernels("compiled, one pass", cpu.tile_norm), Backend("reference (PyTorch)", reference.tile_norm)],
)


def tile_norm(
    x: Float[Tensor, "*batch D"], *, tile: int | None = None, dtype: torch.dtype | None = None
) -> Float[Tensor, "*batch D"]:
    """Divide each tile of the last axis by its root mean square; a zero tile and its gradient stay 0.

        y_i = x_i / sqrt(mean of x_j^2 over the tile of i)

    Squares are taken in float32 or better: numbers below about 1e-22 count as 0, and numbers above about 1e19 give nan
    (0 in exported graphs).

    Args:
        x: (..., D) in any float dtype; sums are taken in float32 or better.
        tile: width of a tile, a divisor of D; None is the whole vector.
        dtype: the dtype of the result; None is the dtype of x.

    Returns:
        (..., D).

    Raises:
        InputError: a tile that does not divide D.

    Cost: one pass over x forward; one pass backward over x, which is kept, and over the result's gradient.
    Source: TScale and 3Lin, which normalise states and projections in this way.
    """
    width = x.shape[-1]
    size = width if tile is None else tile
    if size < 1 or width % size:
        raise InputError(f"tile: {tile} given, but it must divide the width, {width}")
    dtype = dtype or x.dtype
    if is_exported():  # as one operator in the graph
        return _as_operator(x, size).to(dtype)
    # The kernels must support the dtypes of both x and the result.
    return TILE_NORM(x, size, dtype, dtype=x.dtype if dtype in CPU_DTYPES else dtype)


def _as_operator(x: Tensor, tile: int) -> Tensor:
    """The norm by PyTorch's operator; the smallest normal number, added to the mean square, keeps a zero tile 0."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    ones, smallest = wide.new_ones(tile), torch.finfo(wide.dtype).tiny
    tiles = wide if tile == x.shape[-1] else wide.unflatten(-1, (-1, tile))
    return torch.nn.functional.rms_norm(tiles, (tile,), ones, smallest).view_as(wide)
