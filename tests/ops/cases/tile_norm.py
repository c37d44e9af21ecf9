"""Inputs on which every backend of `tile_norm` is held against the definition."""

import torch
from torch import Tensor

SHAPES = {
    "whole vectors": ((2, 67, 13), None),
    "tiles": ((2, 67, 24), 8),
    "odd tiles": ((3, 5, 35), 7),
    "single numbers": ((4, 5), 1),
    "one vector": ((129,), None),
    "no vectors": ((0, 6), 3),
}
"""Shape and tile."""


def make_input(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal numbers of that case, their size different in each row, with some zero tiles."""
    shape, tile = SHAPES[name]
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=dtype)
    x = x * (8 * torch.randn(*shape[:-1], 1, generator=generator, dtype=dtype)).exp2()
    tiles = x.unflatten(-1, (-1, tile or shape[-1]))
    is_zero = torch.rand(tiles.shape[:-1], generator=generator) < (0.2 if len(shape) > 1 else 0.0)
    return tiles.masked_fill(is_zero[..., None], 0.0).flatten(-2)
