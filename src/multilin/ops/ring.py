"""Windows as rings: buffers in which a new token replaces the oldest token, so no step copies a window.

The state that an op returns holds the last tokens in order. While a sequence is generated token by token, its last
tokens lie in a ring of S slots: slot n mod S holds token number n of the sequence. An op that gets a `Ring` returns a
state of the same type with only the new tokens. The model writes them into the ring.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Slots(NamedTuple):
    """Describes the fields of an op's state that are windows (B, S, ...), as the state's property `slots`."""

    fields: tuple[str, ...]
    are_positions: bool = False  # the token at position n lies in slot n; the window is not in the order of tokens
    are_multiplied: bool = False  # the op multiplies the (B, S, H, D) fields as one matrix of slots per head


def slots_of(state: Any) -> Slots | None:
    """The `slots` of a state that is a window of at least one token; None for other states."""
    slots: Slots | None = getattr(state, "slots", None)
    return slots if slots is not None and getattr(state, slots.fields[0]).shape[1] > 0 else None


class Ring(NamedTuple):
    """The last tokens of each sequence. The next token goes into slot `num_read_B` mod S."""

    tokens: Any  # a state of an op whose windows have S slots
    num_read_B: Tensor  # (B,) int64 tokens read
    num_kept: int  # slots when the ring is full; S is smaller while all sequences are shorter

    @property
    def num_slots(self) -> int:
        """The number of slots, S."""
        return getattr(self.tokens, self.tokens.slots.fields[0]).shape[1]

    def distances(self, num_new: int) -> Tensor:
        """Distances in tokens from each of the next T tokens back to each slot's token, (B, T, S), at least 1."""
        new_T = torch.arange(num_new, device=self.num_read_B.device)
        slot_S = torch.arange(self.num_slots, device=self.num_read_B.device)
        age_BS = (self.num_read_B[:, None] - 1 - slot_S) % (slot_S[-1:] + 1) + 1  # S as a tensor: a graph fits any S
        return age_BS[:, None, :] + new_T[:, None]
