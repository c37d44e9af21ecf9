"""Inputs on which every backend of `windowed_attention` is held against the definition, and timed."""

from typing import Any

import torch
from torch import Tensor

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"window": 5},
    "itself only": {"window": 0, "null_key": True},
    "one before": {"window": 1, "null_key": True, "hyper": 0.5},
    "copied from before": {"window": 1},
    "linear decay": {"window": 64, "scale": 0.3, "slope": 0.25},
    "hyperbolic decay": {"window": 8, "scale": 0.3, "hyper": 13.3},
    "null key": {"window": 33, "scale": 0.1, "slope": 0.5, "null_key": True},
    "peaked": {"window": 7, "scale": 30.0},
    "everything": {"window": 1000, "scale": 0.2},
}


def make_inputs(
    batch: int, length: int, heads: int, width: int, value_width: int, *, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, standard normal, float64."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, length, heads, width)] * 2 + [(batch, length, heads, value_width)]
    queries, keys, values = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return queries, keys, values
