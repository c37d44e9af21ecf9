"""Inputs on which every backend of `linear_recurrence` is held against the definition."""

from collections.abc import Callable

import torch
from torch import Tensor

GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "random": lambda noise: noise,
    "nearly shut": lambda noise: noise - 9,
    "open": lambda noise: noise + 9,
    "beyond float32's exponential": lambda noise: 150 * noise,
    "some shut": lambda noise: noise.masked_fill(noise > 0.5, -torch.inf),
}
"""Gate logits by name, made from normal noise (B, T, D)."""

SHAPES = {"odd sizes": (2, 67, 13), "many chunks": (3, 1100, 18), "one token": (1, 1, 1), "wide": (1, 9, 200)}


def make_inputs(
    gates: str, shape: str, *, seed: int = 0, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs (B, T, 2, D), hidden states before them (B, D), and starts of texts (B, T), one in seven positions."""
    num_batch, num_time, width = SHAPES[shape]
    generator = torch.Generator().manual_seed(seed)
    noise, candidates = torch.randn(2, num_batch, num_time, width, generator=generator, dtype=dtype)
    before = torch.rand(num_batch, width, generator=generator, dtype=dtype)
    starts = torch.rand(num_batch, num_time, generator=generator) < 1 / 7
    return torch.stack([GATES[gates](noise), 2 * candidates], dim=2), before, starts
