"""Inputs on which every backend of `delta_rule` is held against the definition, and timed."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

SWITCHES = {
    "gated delta rule": (True, True),
    "delta rule": (False, True),
    "gated linear attention": (True, False),
    "linear attention": (False, False),
}
"""Whether there are decays, and rates."""


class Inputs(NamedTuple):
    """Arguments of the op."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    log_decays: Tensor | None
    rates: Tensor | None
    memory: Tensor

    def given(self) -> list[Tensor]:
        """Those that there are."""
        return [x for x in self if x is not None]

    def map(self, function: Callable[[Tensor], Tensor]) -> "Inputs":
        """The function of each."""
        return Inputs(*(None if x is None else function(x) for x in self))

    def map_tokens(self, function: Callable[[Tensor], Tensor]) -> "Inputs":
        """The function of all but the memory."""
        return Inputs(*(None if x is None else function(x) for x in self[:-1]), memory=self.memory)


def make_inputs(
    name: str, batch: int, length: int, heads: int, width: int, value_width: int, *, seed: int = 0
) -> Inputs:
    """Queries and keys of length 1, decays among them some that forget nearly all and all, in float64."""
    has_decays, has_rates = SWITCHES[name]
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, length, heads)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    def share() -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    log_decays = -0.3 * share()
    log_decays[share() < 0.03] = -40.0
    log_decays[share() < 0.02] = -torch.inf
    return Inputs(
        normalize(draw(*shape, width), dim=-1), normalize(draw(*shape, width), dim=-1), draw(*shape, value_width),
        log_decays if has_decays else None, share() if has_rates else None, draw(batch, heads, width, value_width),
    )  # fmt: skip
