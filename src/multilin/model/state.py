"""The state of a text: a model's memory of all tokens that it has read.

Users hold a `TextState`. It has a value for each part of the model, the embedding and then every layer: a (nested)
NamedTuple of tensors. While a text is read token by token, the windows in these values lie in rings (see
`multilin.ops.ring`), which are written in place; the functions below `open_state` lay them out and grow them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from multilin.errors import InputError
from multilin.ops.ring import Ring, slots_of

LONGEST_STEP = 16  # most new tokens in a call that reads from rings; for more, windows in token order are faster
FEWEST_SLOTS = 256  # fewest slots of a ring that is not full yet; doubled when tokens fill them


class TextState(Cache):
    """The state of a model, a transformers Cache: the states of the embedding and of every layer.

    `model(ids, past_key_values=state)` continues from the state and changes it in place, like a cache of transformers;
    `clone` it first to keep a snapshot. `model.generate(ids, past_key_values=state)` continues from a copy.

    parts: the values of the embedding, which counts and hashes the tokens of each row, and of every layer, as they lie
        in memory; None before the first token. In `values`, windows are in the order of the tokens.
    kinds: the kind of each layer, see `MultilinConfig.layer_kinds`.
    num_columns: columns of `input_ids` that were read, with padding; transformers calls it the cache's length.
    """

    def __init__(self, kinds: tuple[str, ...]) -> None:
        super().__init__(layers=[])
        self.kinds = kinds
        self.parts: list[Any] = [None] * (len(kinds) + 1)
        self.num_columns = 0
        # The number of columns and the values before each recorded call, oldest first; None if not recording.
        self._earlier: list[tuple[int, list[Any]]] | None = None

    def __len__(self) -> int:
        """Number of layers, as transformers counts."""
        return len(self.kinds)

    @property
    def part_names(self) -> list[str]:
        """The name of each part, as in state files."""
        return ["embedding", *(f"layers.{index}" for index in range(len(self.kinds)))]

    @property
    def values(self) -> list[Any]:
        """The values of all parts, windows in the order of their tokens."""
        return [map_windows(from_ring, part) for part in self.parts]

    @property
    def num_tokens(self) -> Tensor | None:
        """Number of tokens that each row has read, (B,) int64; None before the first token."""
        return None if self.parts[0] is None else self.parts[0].num_read_B

    @property
    def batch_size(self) -> int | None:
        """Number of rows; None before the first token is read."""
        return None if self.num_tokens is None else len(self.num_tokens)

    @property
    def num_bytes(self) -> int:
        """Size of all tensors of `named_tensors`; rings that are not full yet take less memory."""
        return sum(tensor.nbytes for _, tensor in self.named_tensors())

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor with its name, such as `layers.3.queries.logits_BSH`; windows are in token order."""
        for name, value in zip(self.part_names, self.values, strict=True):
            yield from named_tensors(value, name)

    def replace_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace each tensor by the tensor of the same name, see `named_tensors`."""
        in_order = (tensors[name] for name, _ in self.named_tensors())
        self.parts = [map_tensors(lambda _: next(in_order), value) for value in self.values]

    def clone(self) -> "TextState":
        """An independent copy: a snapshot to come back to."""
        return self.map(torch.clone)

    def __deepcopy__(self, memo: dict[int, Any]) -> "TextState":
        """The same as `clone`; unlike deepcopy, it also copies tensors with gradients."""
        return self.clone()

    def fork(self, num_continuations: int) -> "TextState":
        """A copy with every row repeated in place this many times, to continue each text in several ways."""
        if num_continuations < 1:
            raise InputError(f"num_continuations: {num_continuations} given, but it must be at least 1")
        return self.map(lambda tensor: tensor.repeat_interleave(num_continuations, dim=0))

    def select(self, rows: list[int]) -> "TextState":
        """A copy of these rows, in this order; a state that has read nothing has no rows and is copied whole.

        Raises:
            InputError: no rows are given, or a row that the state does not have.
        """
        if self.batch_size is None:
            return self.clone()
        num_rows = self.batch_size
        if not rows or not all(0 <= row < num_rows for row in rows):
            raise InputError(f"rows: {rows} given, but it must list rows from 0 to {num_rows - 1}")
        return self.map(lambda tensor: tensor[rows])

    @torch.inference_mode()
    def join(self, other: "TextState") -> None:
        """Append the rows of another state, which must not be used afterwards."""
        if self.num_tokens is None or other.num_tokens is None:
            if self.num_tokens is None:
                self.num_columns, self.parts = other.num_columns, other.parts
            return
        pairs = zip(self._with_rings(1), other._with_rings(1), strict=True)
        self.parts = [join_rings(*pair) for pair in pairs]
        self.num_columns = max(self.num_columns, other.num_columns)

    @torch.inference_mode()
    def leave(self, row: int) -> "TextState":
        """Remove a row and return it as a new state; the last row takes its place."""
        left, last = self.select([row]), (self.batch_size or 0) - 1
        if last == 0:
            self.reset()
        else:
            rows = [last if index == row else index for index in range(last)]
            self.batch_select_indices(torch.tensor(rows, device=left.parts[0].num_read_B.device))
        return left

    def to(self, device: torch.device | str) -> "TextState":
        """A copy on this device."""
        return self.map(lambda tensor: tensor.to(device, copy=True))

    def map(self, function: Callable[[Tensor], Tensor]) -> "TextState":
        """A new state with the function applied to every tensor."""
        copy = TextState(self.kinds)
        copy.num_columns = self.num_columns
        copy.parts = [map_tensors(function, part) for part in self.parts]
        return copy

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace each row i by row beam_idx[i]."""
        self.parts = self.map(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device))).parts

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows."""
        self.parts = self.map(lambda tensor: tensor[indices]).parts

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row this many times."""
        self.parts = self.map(lambda tensor: tensor.repeat_interleave(repeats, dim=0)).parts

    def begin_reading(self, num_new: int, *, is_plain: bool) -> list[Any]:
        """The values of all parts before a call of the model; `advance` takes the values after it.

        A plain call has no padding, begins no document and counts positions. If it has few new columns, windows
        are rings, which are written in place. With gradients, with recorded states, and in traced graphs, which would
        miss the writing in place, windows are not rings.
        """
        is_short = self.num_tokens is not None and num_new <= LONGEST_STEP
        is_traced = torch.is_grad_enabled() or torch.compiler.is_compiling()
        if not is_plain or not is_short or is_traced or self._earlier is not None:
            self.parts = [map_tensors(_unlocked, value) for value in self.values]
        else:
            self.parts = self._with_rings(num_new)
        return self.parts

    def _with_rings(self, num_new: int) -> list[Any]:
        """The values of all parts, windows as rings with room for `num_new` tokens."""
        return [map_windows(lambda window: self._as_ring(window, num_new), part) for part in self.parts]

    def _as_ring(self, window: Any, num_new: int) -> Any:
        ring = (
            grow(window, num_new)
            if isinstance(window, Ring)
            else to_ring(window, cast(Tensor, self.num_tokens), num_new)
        )
        # A tensor made in inference mode can be changed in inference mode only.
        is_locked = isinstance(ring, Ring) and ring.tokens[0].is_inference() and not torch.is_inference_mode_enabled()
        return map_tensors(torch.clone, ring) if is_locked else ring

    def advance(self, values: list[Any], num_columns: int) -> None:
        """Store the value of every part after a call of the model that read `num_columns` columns.

        For a ring, the value holds only the new tokens, which are then written into the ring.
        """
        if self._earlier is not None:
            self._earlier.append((self.num_columns, self.values))
        num_read_B = values[0].num_read_B
        pairs = zip(self.parts, values, strict=True)
        self.parts = [map_windows(lambda old, new: write(old, new, num_read_B), *pair) for pair in pairs]
        self.num_columns += num_columns

    def activate_past_recording(self) -> None:
        """Keep the state before each further call, so that `crop` can go back."""
        self._earlier = self._earlier or []

    @property
    def is_recording(self) -> bool:
        """Whether the states before further calls are kept."""
        return self._earlier is not None

    def crop(self, tokens_to_remove: int) -> None:
        """Go back by at least -tokens_to_remove columns, to the state before one of the recorded calls.

        A running sum cannot forget single tokens, so `crop` takes back whole calls. generate() then reads again the
        tokens after `num_columns` that should have been kept. Recorded states that no later `crop` can need
        are dropped. transformers' assisted decoding calls `crop` after each round.

        Args:
            tokens_to_remove: number of columns, as a negative number or 0; transformers before 5.20 gives the positive
                number of columns to keep instead.

        Raises:
            InputError: no recorded state is early enough.
        """
        kept = tokens_to_remove if tokens_to_remove > 0 else self.num_columns + tokens_to_remove
        if kept >= self.num_columns:
            if self._earlier is not None:
                self._earlier.clear()
            return
        while self._earlier:
            num_columns, values = self._earlier.pop()
            if num_columns <= kept:
                self.num_columns, self.parts = num_columns, values
                self._earlier.clear()
                return
        raise InputError("state: tokens cannot be taken back; clone the state first and continue from the clone")

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of columns read, padding included (`num_columns`); see `num_tokens` for the tokens of each row."""
        return self.num_columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1, which means no limit."""
        return -1

    get_max_cache_shape = get_max_length  # the name in older versions of transformers
    is_croppable = False  # `crop` can only go back to recorded calls

    def update(self, *_: Any, **__: Any) -> Any:
        """Refuse keys and values, which a state does not have."""
        raise InputError("state: a multilin state holds no keys and values; models of other kinds cannot use it")

    def reset(self) -> None:
        """Go back to the start of a text."""
        self.num_columns, self.parts = 0, [None] * len(self.parts)
        self._earlier = None if self._earlier is None else []


def _unlocked(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if the tensor was made in inference mode and inference mode is now off.

    Compiled code cannot ask how a tensor was made: it copies if gradients are on, and else reads the tensor itself.
    """
    if torch.compiler.is_compiling():
        return tensor.clone() if torch.is_grad_enabled() else tensor
    return tensor.clone() if tensor.is_inference() and not torch.is_inference_mode_enabled() else tensor


def open_state(given: TextState | None, kinds: tuple[str, ...], num_batch: int) -> TextState:
    """The caller's `past_key_values` after a check, or for None the state at the start of a text.

    Raises:
        InputError: not a TextState, or a state with other layers or another number of rows.
    """
    if given is None:
        return TextState(kinds)
    if not isinstance(given, TextState):
        raise InputError(
            f"past_key_values: {type(given).__name__} given, but it must be a TextState, as this model returns it"
        )
    if len(given.kinds) != len(kinds):
        raise InputError(f"past_key_values: a state of {len(given.kinds)} layers, but this model has {len(kinds)}")
    if given.kinds != kinds:
        its, own = next(pair for pair in zip(given.kinds, kinds, strict=True) if pair[0] != pair[1])
        raise InputError(
            f"past_key_values: the state belongs to another model: it has a layer of {its}, but this model has {own}"
        )
    if given.batch_size not in (None, num_batch):
        raise InputError(
            f"past_key_values: a state of {given.batch_size} rows given for {num_batch} rows of input_ids; "
            "fork or select its rows first"
        )
    return given


def parts_of(state: Any) -> dict[str, Any] | None:
    """The parts of a container (NamedTuple, tuple, list or dictionary) by name or number; None for any other value."""
    if isinstance(state, dict):
        return {str(name): part for name, part in state.items()}
    if isinstance(state, tuple | list):
        names = getattr(state, "_fields", map(str, range(len(state))))
        return dict(zip(names, state, strict=True))
    return None


def like(state: Any, parts: Sequence[Any]) -> Any:
    """A container of the same type as `state`, with these parts."""
    if isinstance(state, dict):
        return type(state)(zip(state, parts, strict=True))
    return type(state)(*parts) if hasattr(state, "_fields") else type(state)(parts)


def map_tensors(function: Callable[..., Tensor], state: Any, *others: Any) -> Any:
    """Apply a function to every tensor in nested containers, together with the corresponding tensors of `others`."""
    if isinstance(state, Tensor):
        return function(state, *others)
    parts = parts_of(state)
    if parts is None:
        return state
    nests = [parts.values(), *((parts_of(other) or {}).values() for other in others)]
    return like(state, [map_tensors(function, *those) for those in zip(*nests, strict=True)])


def tensors_of(states: Any) -> Iterator[Tensor]:
    """Every tensor in nested containers, in order."""
    if isinstance(states, Tensor):
        yield states
    for part in (parts_of(states) or {}).values():
        yield from tensors_of(part)


def named_tensors(state: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in nested containers, with its dotted name."""
    if isinstance(state, Tensor):
        yield name, state
    for field, part in (parts_of(state) or {}).items():
        yield from named_tensors(part, f"{name}.{field}")


def put_rows(states: list[Any], parts: list[Any], rows: Tensor) -> list[Any]:
    """The states with `rows` replaced by the rows of `parts`, in order."""

    def put(old: Tensor, new: Tensor) -> Tensor:
        old, new = padded(old, new), padded(new, old)  # a state may grow
        return old.index_copy(0, rows, new.to(old.dtype))

    return [map_tensors(put, *pair) for pair in zip(states, parts, strict=True)]


def padded(tensor: Tensor, other: Tensor) -> Tensor:
    """The tensor with zeros at its ends, so that no axis but the first is shorter than in the other tensor."""
    if tensor.shape[1:] == other.shape[1:]:
        return tensor
    sizes = zip(reversed(tensor.shape[1:]), reversed(other.shape[1:]), strict=True)
    return torch.nn.functional.pad(tensor, [edge for own, size in sizes for edge in (0, max(size - own, 0))])


def map_windows(function: Callable[..., Any], state: Any, *others: Any) -> Any:
    """Apply a function to every window of a (nested) state, together with the values at its place in `others`."""
    if isinstance(state, Ring) or slots_of(state) is not None:
        return function(state, *others)
    parts = parts_of(state)
    if parts is None or any(parts_of(other) is None for other in others):
        return others[0] if others else state
    nests = [parts.values(), *((parts_of(other) or {}).values() for other in others)]
    return like(state, [map_windows(function, *those) for those in zip(*nests, strict=True)])


def to_ring(state: Any, num_read_B: Tensor, num_new: int) -> Any:
    """A copy of a window as a ring with room for `num_new` more tokens."""
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
    """The ring with room for `num_new` more tokens, up to `num_kept` slots; the ring itself if it has room."""
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
    """If `ring` is a ring, write the new tokens (B, T, ...) of the state `new` into its slots; else return `new`.

    The ring is written in place; num_read_B counts the tokens read, including the new tokens.
    """
    if not isinstance(ring, Ring):
        return new
    slots, num_slots = {name: getattr(new, name) for name in new.slots.fields}, ring.num_slots
    num_all = next(iter(slots.values())).shape[1]
    num_new = min(num_all, num_slots)  # earlier ones would be overwritten
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
    """Join two (nested) states whose windows are rings into one state with the rows of both."""
    if isinstance(state, Tensor):
        return torch.cat([padded(state, other), padded(other, state)])  # a state may grow
    if isinstance(state, Ring):
        num_slots = max(state.num_slots, other.num_slots)
        state, other = (_with_slots(ring, num_slots) for ring in (state, other))
        names = state.tokens.slots.fields
        both = join_rings(state.tokens, other.tokens)
        laid_out = {name: _lay_out(getattr(both, name), both) for name in names}
        return Ring(both._replace(**laid_out), torch.cat([state.num_read_B, other.num_read_B]), state.num_kept)
    parts = parts_of(state)
    if parts is None:
        return state
    pairs = zip(parts.values(), (parts_of(other) or {}).values(), strict=True)
    return like(state, [join_rings(*pair) for pair in pairs])


def _enough_slots(num_read_B: Tensor, num_new: int, num_kept: int) -> int:
    """The smallest of 256, 512, ... slots that hold all tokens; on a GPU `num_kept`, to avoid waiting for the GPU."""
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
