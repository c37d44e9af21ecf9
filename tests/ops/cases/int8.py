"""Inputs on which every backend of the int8 products is held against the definition, and timed."""

import torch
from torch import Tensor

SHAPES = {
    "odd widths": ((2, 5), 13, 7),
    "one token": ((1, 1), 16, 24),
    "a projection": ((1, 67), 128, 96),
    "one output": ((3,), 5, 1),
    "wide": ((2, 3), 1031, 4),
}
"""Batch shape, width of x, width of the result."""


def make_inputs(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and bias of that case, standard normal."""
    batch, width, out = SHAPES[name]
    generator = torch.Generator().manual_seed(seed)
    shapes = ((*batch, width), (out, width), (out,))
    first, second, third = (torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes)
    return first, second, third
