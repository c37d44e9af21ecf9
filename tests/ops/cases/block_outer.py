"""Inputs on which every backend of `block_outer` is held against the definition, and timed."""

import torch
from torch import Tensor

SHAPES = {
    "3Lin's combiner": ((2, 5), 3, 16, 16, 7),
    "TScale's combiner": ((2, 5), 6, 4, 4, 7),
    "ELiTA's feed-forward": ((2, 5), 1, 13, 8, 7),
    "one row": ((), 2, 3, 5, 1),
}
"""Batch shape, N blocks, K, J, and the width of the result."""


def make_inputs(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Left, right and weight of that case, standard normal."""
    batch, num_blocks, left, right, out = SHAPES[name]
    generator = torch.Generator().manual_seed(seed)
    shapes = ((*batch, num_blocks, left), (*batch, num_blocks, right), (out, num_blocks, left, right))
    first, second, third = (torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes)
    return first, second, third
