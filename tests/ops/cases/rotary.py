"""Inputs on which every backend of `rotary` is held against the definition."""

import torch
from torch import Tensor

SHAPES = {
    "blocks": ((2, 67, 3, 128), 64),
    "one block": ((2, 11, 2, 6), 6),
    "single pairs": ((1, 5, 3, 10), 2),
    "no tokens": ((2, 0, 3, 4), 4),
}
"""Shape and block."""


def make_inputs(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """x, cos and sin of that case: normal numbers and any angles."""
    shape, _ = SHAPES[name]
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=dtype)
    angle = 7 * torch.randn(*shape[:2], shape[-1] // 2, generator=generator, dtype=dtype)
    return x, angle.cos(), angle.sin()
