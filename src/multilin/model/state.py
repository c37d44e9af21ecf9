"""The state of a text: a model's memory of all tokens that it has read, of constant size."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from multilin.errors import InputError
from multilin.model.rings import from_ring, grow, join_rings, map_windows, to_ring, write
from multilin.model.state_tree import map_tensors, named_tensors
from multilin.ops.ring import Ring

LONGEST_STEP = 16  # new tokens that are read from rings; more are read faster from windows in their order


class LayerState(CacheLayerMixin):
    """One layer's state inside transformers' Cache: None before the first token, then a NamedTuple of tensors."""

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.value: Any = None

    def get_seq_length(self) -> int:
        """0: the TextState counts the tokens."""
        return 0

    def get_max_length(self) -> int:
        """-1: no limit."""
        return -1

    get_max_cache_shape = get_max_length  # the name in older versions of transformers

    def get_mask_sizes(self, query_length: int, *_: Any) -> tuple[int, int]:
        """The mask covers the new tokens only."""
        return query_length, 0

    def lazy_initialization(self, *_: Any) -> None:
        """Do nothing: the model's layer makes the state."""

    def update(self, *_: Any, **__: Any) -> Any:
        """Refuse keys and values, which a state does not have."""
        raise InputError("state: a multilin state holds no keys and values; models of other kinds cannot use it")


class TextState(Cache):
    """The states of the embedding and of every layer, in transformers' Cache.

    A model reads it and leaves it changed in place (`model(ids, past_key_values=state)`), as transformers' caches are;
    `clone` first to keep a snapshot. `model.generate(ids, past_key_values=state)` continues from a clone by itself.

    embedding: the state of the embedding, which counts and hashes the tokens of each row.
    layers: the states of the layers.
    kinds: what each layer is, see `MultilinConfig.layer_kinds`.
    num_columns: number of columns of `input_ids` that were read, padding included; transformers' length of a cache.
    """

    def __init__(self, kinds: tuple[str, ...]) -> None:
        super().__init__(layers=[LayerState() for _ in kinds])
        self.kinds = kinds
        self.embedding = LayerState()
        self.num_columns = 0
        # The number of columns and the values before each recorded call, oldest first; None if not recording.
        self._earlier: list[tuple[int, list[Any]]] | None = None

    @property
    def parts(self) -> list[LayerState]:
        """The state of the embedding, then those of the layers."""
        return [self.embedding, *self.layers]

    @property
    def part_names(self) -> list[str]:
        """The names of the parts in files."""
        return ["embedding", *(f"layers.{index}" for index in range(len(self.layers)))]

    @property
    def values(self) -> list[Any]:
        """The NamedTuples of all parts, windows in the order of their tokens; None before the first token."""
        return [map_windows(from_ring, part.value) for part in self.parts]

    @values.setter
    def values(self, values: list[Any]) -> None:
        for part, value in zip(self.parts, values, strict=True):
            part.value = value

    @property
    def num_tokens(self) -> Tensor | None:
        """Tokens read by each row, (B,) int64; None before the first."""
        return None if self.embedding.value is None else self.embedding.value.num_read_B

    @property
    def batch_size(self) -> int | None:
        """Number of rows; None before the first token."""
        return None if self.num_tokens is None else len(self.num_tokens)

    @property
    def num_bytes(self) -> int:
        """Size of all tensors of `named_tensors`; rings that are not full yet take less memory."""
        return sum(tensor.nbytes for _, tensor in self.named_tensors())

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor with its name, `layers.3.queries.logits_BSH`; the tokens of a window are in their order."""
        for name, value in zip(self.part_names, self.values, strict=True):
            yield from named_tensors(value, name)

    def replace_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace all tensors by those of the same names, see `named_tensors`."""
        in_order = (tensors[name] for name, _ in self.named_tensors())
        self.values = [map_tensors(lambda _: next(in_order), value) for value in self.values]

    def clone(self) -> "TextState":
        """An independent copy: a snapshot to come back to."""
        return self.map(torch.clone)

    def __deepcopy__(self, memo: dict[int, Any]) -> "TextState":
        """As `clone`, which also copies tensors with gradients."""
        return self.clone()

    def fork(self, num_continuations: int) -> "TextState":
        """A copy with every row repeated in place this many times, to continue each text in several ways."""
        if num_continuations < 1:
            raise InputError(f"num_continuations: {num_continuations} given, but it must be at least 1")
        return self.map(lambda tensor: tensor.repeat_interleave(num_continuations, dim=0))

    def select(self, rows: list[int]) -> "TextState":
        """A copy of these rows, in this order; of a state that has read nothing, and has no rows yet, a copy.

        Raises:
            InputError: no rows, or one that the state does not have.
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
                self.num_columns, self.values = other.num_columns, [part.value for part in other.parts]
            return
        for state in (self, other):
            for part in state.parts:
                part.value = map_windows(lambda window, state=state: state._as_ring(window, 1), part.value)
        for part, added in zip(self.parts, other.parts, strict=True):
            part.value = join_rings(part.value, added.value)
        self.num_columns = max(self.num_columns, other.num_columns)

    @torch.inference_mode()
    def leave(self, row: int) -> "TextState":
        """Remove a row and return it as a state of its own; the last row takes its place."""
        left, last = self.select([row]), (self.batch_size or 0) - 1
        if last == 0:
            self.reset()
        else:
            rows = [last if index == row else index for index in range(last)]
            self.batch_select_indices(torch.tensor(rows, device=self.embedding.value.num_read_B.device))
        return left

    def to(self, device: torch.device | str) -> "TextState":
        """A copy on this device."""
        return self.map(lambda tensor: tensor.to(device, copy=True))

    def map(self, function: Callable[[Tensor], Tensor]) -> "TextState":
        """A new state with the function applied to every tensor."""
        copy = TextState(self.kinds)
        copy.num_columns = self.num_columns
        copy.values = self._mapped(function)
        return copy

    def _mapped(self, function: Callable[[Tensor], Tensor]) -> list[Any]:
        return [map_tensors(function, part.value) for part in self.parts]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes row beam_idx[i]."""
        self.values = self._mapped(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows."""
        self.values = self._mapped(lambda tensor: tensor[indices])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row this many times."""
        self.values = self._mapped(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def begin_reading(self, num_new: int, *, is_plain: bool) -> list[Any]:
        """The values of all parts before a call of the model; `advance` takes the values after it.

        In a call with few new columns, and plain (no padding, no document begins, positions are counted), windows are
        rings, which are written in place. Gradients and recorded states do not allow that, and traced graphs do not
        show it.
        """
        is_short = self.num_tokens is not None and num_new <= LONGEST_STEP
        is_traced = torch.is_grad_enabled() or torch.compiler.is_compiling()
        if not is_plain or not is_short or is_traced or self._earlier is not None:
            self.values = [map_tensors(_unlocked, value) for value in self.values]
        else:
            for part in self.parts:
                part.value = map_windows(lambda window: self._as_ring(window, num_new), part.value)
        return [part.value for part in self.parts]

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
        """Take the value of every part after a call of the model that read `num_columns` columns.

        The value of a ring holds the new tokens only, which are written into the ring.
        """
        if self._earlier is not None:
            self._earlier.append((self.num_columns, self.values))
        num_read_B = values[0].num_read_B
        for part, value in zip(self.parts, values, strict=True):
            part.value = map_windows(lambda old, new: write(old, new, num_read_B), part.value, value)
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

        A running sum cannot forget single tokens. So this takes back whole calls, and generate() reads the tokens that
        were to be kept again: they begin after `num_columns`. Recorded states that no later `crop` can need are
        dropped. transformers' assisted decoding calls it after each round.

        Args:
            tokens_to_remove: number of columns, as a negative number or 0; transformers before 5.20 gives the positive
                number of columns to keep instead.

        Raises:
            InputError: states were not recorded, or not from so early on.
        """
        kept = tokens_to_remove if tokens_to_remove > 0 else self.num_columns + tokens_to_remove
        if kept >= self.num_columns:
            if self._earlier is not None:
                self._earlier.clear()
            return
        while self._earlier:
            num_columns, values = self._earlier.pop()
            if num_columns <= kept:
                self.num_columns, self.values = num_columns, values
                self._earlier.clear()
                return
        raise InputError("state: tokens cannot be taken back; clone the state first and continue from the clone")

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of columns read, padding included (`num_columns`); see `num_tokens` for the tokens of each row."""
        return self.num_columns

    def reset(self) -> None:
        """Go back to the start of a text."""
        self.num_columns, self.values = 0, [None] * len(self.parts)
        self._earlier = None if self._earlier is None else []


def _unlocked(tensor: Tensor) -> Tensor:
    """The tensor, or a copy that can be used outside of inference mode, in which it was made.

    Compiled code cannot ask how a tensor was made; without gradients it may be read as it is.
    """
    if torch.compiler.is_compiling():
        return tensor.clone() if torch.is_grad_enabled() else tensor
    return tensor.clone() if tensor.is_inference() and not torch.is_inference_mode_enabled() else tensor


def open_state(given: TextState | None, kinds: tuple[str, ...], num_batch: int) -> TextState:
    """The state in the caller's `past_key_values`, or without one the state at the start of a text.

    Raises:
        InputError: not a TextState, or a state of other layers, or of another number of layers or rows.
    """
    if given is None:
        return TextState(kinds)
    if not isinstance(given, TextState):
        raise InputError(
            f"past_key_values: {type(given).__name__} given, but it must be a TextState, as this model returns it"
        )
    if len(given.kinds) != len(kinds):
        raise InputError(f"past_key_values: a state of {len(given.kinds)} layers, but {len(kinds)} read")
    if given.kinds != kinds:
        its, own = next(pair for pair in zip(given.kinds, kinds, strict=True) if pair[0] != pair[1])
        raise InputError(f"past_key_values: the state of another model, which has a layer of {its}; this has {own}")
    if given.batch_size not in (None, num_batch):
        raise InputError(
            f"past_key_values: a state of {given.batch_size} rows given for {num_batch} rows of input_ids; "
            "fork or select its rows first"
        )
    return given
