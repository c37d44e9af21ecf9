"""Inputs on which every backend of `causal_mixing` is held against the definition, and timed."""

import torch
from torch import Tensor

SHAPES = {
    "whole context": (2, 13, 5, 13),
    "few of many": (3, 7, 5, 67),
    "one token": (2, 1, 3, 11),
    "one position": (1, 1, 1, 1),
}
"""B, T, D and the number of positions n."""


def make_inputs(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """x, triangle and bias of that case, standard normal."""
    num_batch, num_time, width, num_positions = SHAPES[name]
    generator = torch.Generator().manual_seed(seed)
    shapes = ((num_batch, num_time, width), (num_positions * (num_positions + 1) // 2,), (num_positions,))
    x, triangle, bias = (torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes)
    return x, triangle, bias
