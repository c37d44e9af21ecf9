"""Inputs on which every backend of `linear_recurrence` is held against the definition."""

from collections.abc import Callable
from typing import Any

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


def results_and_gradients(compute: Any, inputs: Tensor, before: Tensor, starts: Tensor | None) -> list[Tensor]:
    """Hidden states, the last of them, and the gradients of inputs and of what was before them."""
    needed = [x.detach().requires_grad_() for x in (inputs, before)]
    results = compute(*needed, starts)
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64).bfloat16().to(x) for x in results]
    return [*(x.detach() for x in results), *torch.autograd.grad(results, needed, weights)]
