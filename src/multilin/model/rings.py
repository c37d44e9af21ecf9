"""The windows of a state as rings (see `multilin.ops.ring`): laid out, grown, and written in place."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from multilin.ops.ring import Ring, slots_of

FEWEST_SLOTS = 256  # of a ring that is not yet full; doubled as tokens come


def map_windows(function: Callable[..., Any], state: Any, *others: Any) -> Any:
    """Apply a function to every window of a (nested) state and to the values at the same place in the others."""
    if isinstance(state, Ring) or slots_of(state) is not None:
        return function(state, *others)
    if state is None or isinstance(state, Tensor):
        return others[0] if others else state
    return type(state)(*(map_windows(function, *parts) for parts in zip(state, *others, strict=True)))


def to_ring(state: Any, num_read_B: Tensor, num_new: int) -> Any:
    """A copy of a window as a ring with room for `num_new` tokens."""
    slots = state.slots
    num_kept = getattr(state, slots.fields[0]).shape[1]
    num_slots = _enough_slots(num_read_B, num_new, num_kept)
    slot_S = torch.arange(num_slots, device=num_read_B.device)
    if slots.are_positions:
        index_BS = slot_S.expand(len(num_read_B), -1)
    else:
        index_BS = num_kept - 1 - (num_read_B[:, None] - 1 - slot_S) % num_slots
    return Ring(_map_slots(lambda _, tensor: _lay_out(_take(tensor, index_BS), state), state), num_read_B, num_kept)


def from_ring(ring: Any) -> Any:
    """A copy of a ring as a window with its tokens in their order."""
    if not isinstance(ring, Ring):
        return ring
    tokens, num_read_B, num_kept = ring
    index_N = torch.arange(num_kept, device=num_read_B.device)
    number_BN = index_N.expand(len(num_read_B), -1)
    if not tokens.slots.are_positions:
        number_BN = number_BN + num_read_B[:, None] - num_kept
    is_empty_BN = (number_BN < 0) | (number_BN >= num_read_B[:, None])

    def in_order(name: str, tensor: Tensor) -> Tensor:
        taken = _take(tensor, number_BN % ring.num_slots)
        mask = is_empty_BN.view(*is_empty_BN.shape, *(1 for _ in tensor.shape[2:]))
        return taken.masked_fill(mask, _nothing(name))

    return _map_slots(in_order, tokens)


def grow(ring: Any, num_new: int) -> Any:
    """The ring with room for `num_new` tokens, up to the number that it keeps; itself if there is room."""
    if not isinstance(ring, Ring) or ring.num_slots == ring.num_kept:
        return ring
    return _with_slots(ring, _enough_slots(ring.num_read_B, num_new, ring.num_kept))


def _with_slots(ring: Ring, num_slots: int) -> Ring:
    """The ring with at least `num_slots` slots."""
    more = num_slots - ring.num_slots
    if more <= 0:
        return ring

    def fill_up(name: str, tensor: Tensor) -> Tensor:
        empty = tensor.new_full((len(tensor), more, *tensor.shape[2:]), _nothing(name))
        return _lay_out(torch.cat([tensor, empty], dim=1), ring.tokens)

    return ring._replace(tokens=_map_slots(fill_up, ring.tokens))


def write(ring: Any, new: Any, num_read_B: Tensor) -> Any:
    """Write new tokens (B, T, ...), in a state of the same type, into their slots; a value of another kind is replaced.

    The ring is written in place; num_read_B counts the tokens read, including the new tokens.
    """
    if not isinstance(ring, Ring):
        return new
    slots, num_slots = {name: getattr(new, name) for name in new.slots.fields}, ring.num_slots
    num_all = next(iter(slots.values())).shape[1]
    num_new = min(num_all, num_slots)  # earlier ones have no place any more
    first_B = (ring.num_read_B + (num_all - num_new)) % num_slots
    first = first_B.tolist() if first_B.device.type == "cpu" else [0, 1]
    if min(first) == max(first) <= num_slots - num_new:
        for name, tensor in slots.items():
            getattr(ring.tokens, name)[:, first[0] : first[0] + num_new] = tensor[:, -num_new:]
    else:
        slots_BT = (first_B[:, None] + torch.arange(num_new, device=first_B.device)) % num_slots
        rows_B1 = torch.arange(len(first_B), device=first_B.device)[:, None]
        for name, tensor in slots.items():
            target = getattr(ring.tokens, name)
            target[rows_B1, slots_BT] = tensor[:, -num_new:].to(target.dtype)
    others = {name: getattr(new, name) for name in new._fields if name not in slots}
    return Ring(ring.tokens._replace(**others), num_read_B, ring.num_kept)


def join_rings(state: Any, other: Any) -> Any:
    """Two (nested) states whose windows are rings as one state with the rows of both."""
    if isinstance(state, Tensor):
        return torch.cat([state, other])
    if state is None or isinstance(state, int):
        return state
    if isinstance(state, Ring):
        num_slots = max(state.num_slots, other.num_slots)
        state, other = (_with_slots(ring, num_slots) for ring in (state, other))
        names = state.tokens.slots.fields
        both = join_rings(state.tokens, other.tokens)
        laid_out = {name: _lay_out(getattr(both, name), both) for name in names}
        return Ring(both._replace(**laid_out), torch.cat([state.num_read_B, other.num_read_B]), state.num_kept)
    return type(state)(*(join_rings(*parts) for parts in zip(state, other, strict=True)))


def _enough_slots(num_read_B: Tensor, num_new: int, num_kept: int) -> int:
    """The smallest of 256, 512, ... slots that hold all tokens; `num_kept` on a GPU, where looking would wait."""
    if num_kept <= FEWEST_SLOTS or num_read_B.device.type != "cpu":
        return num_kept
    needed = int(num_read_B.max()) + num_new
    return min(max(1 << (needed - 1).bit_length(), FEWEST_SLOTS), num_kept)


def _map_slots(function: Callable[[str, Tensor], Tensor], state: Any) -> Any:
    return state._replace(**{name: function(name, getattr(state, name)) for name in state.slots.fields})


def _nothing(name: str) -> float:
    """The value of an empty slot in a field of this name."""
    return -torch.inf if name.startswith("logits") else 0.0


def _take(tensor: Tensor, index_BS: Tensor) -> Tensor:
    """tensor[b, index[b, s]]."""
    return tensor[torch.arange(len(tensor), device=tensor.device)[:, None], index_BS]


def _lay_out(tensor: Tensor, state: Any) -> Tensor:
    """The tensor (B, S, H, ...); if the op multiplies with it, the slots of each head lie side by side in memory."""
    if tensor.ndim < 4 or not state.slots.are_multiplied:
        return tensor
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)
