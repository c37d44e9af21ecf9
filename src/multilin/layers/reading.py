"""What a layer read: the modules where positions meet say with which weights, in the numbers they computed with."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from multilin.layers.base import Layout


class Reading(NamedTuple):
    """The weights with which each position of a text reads the tokens up to it.

    meaning: one sentence, for people, that says what a weight is.
    weights_BHTS: (B, H, T, T) weight of token s for position t, 0 where it is not read. A module without heads has one.
    nearest, farthest: the distances t - s that are read, both included; farthest None is the start of the text.
    own_BHT: (B, H, T) weight of a further term that is the position's own token once more; None where there is none.
    null_BHT: (B, H, T) weight that goes to nothing; None where there is no such term.
    is_share: whether the weights of a position are none below 0 and sum to 1, own and null included.
    """

    meaning: str
    weights_BHTS: Tensor
    nearest: int
    farthest: int | None
    own_BHT: Tensor | None = None
    null_BHT: Tensor | None = None
    is_share: bool = True


class Reader(nn.Module):
    """A module where positions meet: `forward(x, state, layout)` reads, `reading(x, layout)` says how."""

    def reading(self, x: Tensor, layout: Layout) -> Reading:
        """The weights of the same forward pass, at the start of a text."""
        raise NotImplementedError


@contextlib.contextmanager
def record_readings(layer: nn.Module) -> Iterator[list[tuple[str, Reading]]]:
    """Collect the name and reading of every Reader in a layer, in the order in which they run.

    The layer must be called at the start of a text. Nothing is computed anew but the weights: readers are asked about
    the very inputs that the forward pass gives them.
    """
    found: list[tuple[str, Reading]] = []

    def asked(name: str) -> Any:
        return lambda module, args, _: found.append((name, module.reading(args[0], args[-1])))

    hooks = [
        module.register_forward_hook(asked(name))
        for name, module in layer.named_modules()
        if isinstance(module, Reader)
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
