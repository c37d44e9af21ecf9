"""Inputs on which every backend of `prefix_softmax` is held against the definition, and timed."""

from collections.abc import Callable

import torch
from torch import Tensor

LOGITS: dict[str, Callable[[Tensor], Tensor]] = {
    "random": lambda noise: noise,
    "peaked": lambda noise: 10 * noise,
    "constant": lambda noise: torch.full_like(noise, 3.7),
    "high": lambda noise: noise + 80,
    "low": lambda noise: noise - 80,
    "spikes": lambda noise: noise + 160 * (noise > 1.5) - 80,
    "rising": lambda noise: torch.linspace(-80, 80, noise.shape[1], dtype=noise.dtype)[None, :, None] + 0 * noise,
    "falling": lambda noise: torch.linspace(80, -80, noise.shape[1], dtype=noise.dtype)[None, :, None] + 0 * noise,
    "one early spike": lambda noise: torch.where(torch.arange(noise.shape[1])[None, :, None] == 0, 80.0, noise - 80),
    "thousandfold": lambda noise: 1000 * noise,
    "masked": lambda noise: noise.masked_fill(noise > 0.5, -torch.inf),
    "masked head": lambda noise: noise.masked_fill(torch.arange(noise.shape[1])[None, :, None] < 5, -torch.inf),
    "all masked": lambda noise: torch.full_like(noise, -torch.inf),
}
"""Logits by name, made from normal noise (B, T, H)."""

WINDOWS = (None, 1, 2, 5, 8, 31, 64, 1000)


def make_logits(name: str, shape: tuple[int, int, int], *, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """The logits of that name, of shape (B, T, H)."""
    generator = torch.Generator().manual_seed(seed)
    return LOGITS[name](torch.randn(shape, generator=generator, dtype=dtype))


def make_values(shape: tuple[int, ...], *, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard normal values of this shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def make_starts(shape: tuple[int, int], *, seed: int = 2, share: float = 0.1) -> Tensor:
    """Random text starts (B, T), about `share` of the positions."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share
