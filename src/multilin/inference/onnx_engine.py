"""The engine that runs an exported model in ONNX Runtime, without PyTorch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from multilin.data.added_text import plain_tokenizer
from multilin.errors import InputError, as_input_error
from multilin.inference.manifest import MATCH_INPUTS, MATCH_TOKENS, Manifest, graph_tensors, read_manifest
from multilin.inference.matching import from_window, read_tokens, to_window
from multilin.inference.state_file import StateContents, StateOwner, StateTensor
from multilin.inference.text import TextCodec
from multilin.ops.threads import available_cores, free_cores
from multilin.runs.files import MANIFEST

onnxruntime.disable_telemetry_events()  # nothing about a model leaves the machine

SHORT = 4  # most tokens to read one by one, which is faster than loading the graph of longer pieces
_LEADING = {"step.onnx": ["input_ids", "num_read"], "prompt.onnx": ["input_ids", "num_new", "num_read"]}  # inputs
FEWEST_SLOTS = 64  # slots of a new ring; their number doubles when they are full, up to the ring's limit
EMBEDDING = ("num_read_B", "hash_B", "document_B")
_HASH_FACTOR, _HASH_MASK = np.uint64(6364136223846793005), np.uint64(2**63 - 1)


@dataclass
class OnnxState:
    """The state of some rows.

    about: descriptions of the tensors that the graphs take.
    embedding: state of the embedding, (rows,) int64 by name: `num_read_B`, `hash_B` and `document_B`.
    tensors: inputs of the graphs by name: summaries, and rings, which hold token number n in slot n mod slots.
    texts: the last tokens of each row, see `multilin.inference.matching`; used by models with the longest match.
    room: rings with spare rows; the rings in `tensors` are their first rows.
    """

    about: Sequence[StateTensor]
    embedding: dict[str, NDArray[np.int64]]
    tensors: dict[str, NDArray[Any]]
    texts: list[str]
    room: dict[str, NDArray[Any]] = field(default_factory=dict)

    @property
    def num_read(self) -> NDArray[np.int64]:
        """Number of tokens read by each row."""
        return self.embedding["num_read_B"]

    @classmethod
    def empty(cls, about: Sequence[StateTensor], num_rows: int) -> "OnnxState":
        """A state of `num_rows` rows that have read nothing."""
        tensors = {}
        for one in about:
            shape = list(one.shape)
            if one.is_ring:
                shape[0] = min(FEWEST_SLOTS, shape[0])
            tensor = np.full((num_rows, *shape), one.empty, one.dtype)
            tensors[one.name] = np.ascontiguousarray(_slots_first(tensor, one))
        return cls(about, {name: np.zeros(num_rows, np.int64) for name in EMBEDDING}, tensors, [""] * num_rows)

    @classmethod
    def from_contents(cls, about: Sequence[StateTensor], given: Mapping[str, NDArray[Any]]) -> "OnnxState":
        """The state from the tensors of a state file."""
        embedding = {name: given[f"embedding.{name}"].copy() for name in EMBEDDING}
        tensors = {}
        for one in about:
            tensor = given[one.name]
            if one.is_ring:
                tensor = _slots_first(_as_ring(tensor, one, embedding["num_read_B"]), one)
            tensors[one.name] = np.array(tensor, one.dtype, order="C")
        num_rows = len(embedding["num_read_B"])
        texts = from_window(given[MATCH_TOKENS]) if MATCH_TOKENS in given else [""] * num_rows
        return cls(about, embedding, tensors, texts)

    def contents(self, wanted: Sequence[StateTensor]) -> dict[str, NDArray[Any]]:
        """The tensors of a state file."""
        given = {f"embedding.{name}": numbers for name, numbers in self.embedding.items()}
        tensors: dict[str, NDArray[Any]] = {}
        for one in wanted:
            if one.name == MATCH_TOKENS:
                tensors[one.name] = to_window(self.texts, one.shape[0])
            elif one.is_ring:
                tensors[one.name] = self._in_order(one)
            elif one.name in given or one.kind == "count":
                tensors[one.name] = given.get(one.name, self.num_read).copy()
            else:
                tensors[one.name] = self.tensors[one.name].copy()
        return tensors

    def add(self, ids: NDArray[np.int64], counts: NDArray[np.int64], new: Sequence[NDArray[Any]]) -> None:
        """Add a graph's results for the first `counts` tokens of each row: new slots of rings, and new summaries."""
        for one, tensor in zip(self.about, new, strict=True):
            if one.is_ring:
                self._write(one, tensor, counts)
            else:
                self.tensors[one.name] = tensor
        _advance_hashes(self.embedding["hash_B"], ids, counts)
        self.embedding["num_read_B"] = self.num_read + counts

    def _write(self, about: StateTensor, new: NDArray[Any], counts: NDArray[np.int64]) -> None:
        ring, new = _slots_first(self.tensors[about.name], about), _slots_first(new, about)
        num_slots = ring.shape[1]
        if new.shape[1] == 1 and counts.all():
            if len(ring) == 1:
                ring[0, self.num_read[0] % num_slots] = new[0, 0]
            else:
                ring[np.arange(len(ring)), self.num_read % num_slots] = new[:, 0]
            return
        for row, (begin, count) in enumerate(zip(self.num_read.tolist(), counts.tolist(), strict=True)):
            first = max(count - num_slots, 0)  # earlier tokens no longer fit
            ring[row, np.arange(begin + first, begin + count) % num_slots] = new[row, first:count]

    def grow(self, num_tokens: int) -> None:
        """Make room for `num_tokens` tokens in each ring, but at most for as many tokens as a full ring keeps."""
        for one, tensor in self._rings():
            axis = _slot_axis(one)
            if tensor.shape[axis] >= min(num_tokens, one.shape[0]):
                continue
            edges = [(0, 0)] * tensor.ndim
            edges[axis] = (0, _num_slots(one, num_tokens) - tensor.shape[axis])
            room = self.room.get(one.name, tensor)
            self.room[one.name] = np.pad(room, edges, constant_values=one.empty)
            self.tensors[one.name] = self.room[one.name][: len(tensor)]

    def _rings(self) -> Iterator[tuple[StateTensor, NDArray[Any]]]:
        return ((one, self.tensors[one.name]) for one in self.about if one.is_ring)

    def select(self, rows: Sequence[int]) -> "OnnxState":
        """A copy of these rows in this order."""
        index = np.array(rows, np.int64)
        tensors = {name: tensor[index] for name, tensor in self.tensors.items()}
        embedding = {name: numbers[index] for name, numbers in self.embedding.items()}
        return OnnxState(self.about, embedding, tensors, [self.texts[row] for row in rows])

    def join(self, other: "OnnxState") -> None:
        """Append the rows of another state; if a ring has spare rows, only the new rows are copied."""
        num_slots = max((ring.shape[_slot_axis(one)] for s in (self, other) for one, ring in s._rings()), default=0)
        self.grow(num_slots)
        other.grow(num_slots)
        before, after = len(self.num_read), len(self.num_read) + len(other.num_read)
        for one in self.about:
            ring, added = self.tensors[one.name], other.tensors[one.name]
            if not one.is_ring:
                self.tensors[one.name] = np.concatenate([ring, added])  # without room: each step returns new arrays
                continue
            room = self.room.get(one.name, ring)
            if len(room) < after:
                room = np.empty((max(after, 2 * before), *ring.shape[1:]), ring.dtype)
                room[:before] = ring
                self.room[one.name] = room
            room[before:after] = added
            self.tensors[one.name] = room[:after]
        self.embedding = {name: np.concatenate([self.embedding[name], other.embedding[name]]) for name in EMBEDDING}
        self.texts = self.texts + other.texts

    def leave(self, row: int) -> "OnnxState":
        """Remove a row and return it as a separate state; the last row takes its place."""
        left, last = self.select([row]), len(self.num_read) - 1
        for tensors in (self.tensors, self.embedding):
            for name, tensor in tensors.items():
                kept = tensor if tensor.flags.writeable else tensor.copy()
                kept[row] = kept[last]
                tensors[name] = kept[:last]
        self.texts[row] = self.texts[last]
        self.texts.pop()
        for state in (self, left):
            state._shrink()
        return left

    def _shrink(self) -> None:
        """Remove the slots that the longest remaining row does not need from rings."""
        num_tokens = max(int(self.num_read.max(initial=0)), 1)
        for one, tensor in self._rings():
            ring, num_slots = _slots_first(tensor, one), _num_slots(one, num_tokens)
            if num_slots < ring.shape[1]:
                self.tensors[one.name] = _slots_first(ring[:, :num_slots], one).copy()
                self.room.pop(one.name, None)

    def _in_order(self, about: StateTensor) -> NDArray[Any]:
        """A ring in PyTorch's form: the last tokens in order, or each token in the slot of its position."""
        ring = _slots_first(self.tensors[about.name], about)
        number = np.arange(about.shape[0])[None] + np.zeros((len(ring), 1), np.int64)
        if about.kind == "window":
            number = number + self.num_read[:, None] - about.shape[0]
        is_empty = (number < 0) | (number >= self.num_read[:, None])
        taken: NDArray[Any] = ring[np.arange(len(ring))[:, None], number % ring.shape[1]]
        taken[is_empty] = about.empty
        return taken


class OnnxEngine:
    """An engine that runs an exported model with ONNX Runtime.

    Args:
        folder: the folder that `multilin export` wrote.
        num_threads: threads that compute a step; None leaves their number to ONNX Runtime.
        spins: waiting threads keep their cores busy, which is faster if nothing else needs the cores.

    Raises:
        InputError: the folder has no export, or its export is of another version or of files that do not match.
    """

    name, kind = "onnx", "multilin"
    keeps_states = True

    def __init__(self, folder: str | Path, num_threads: int | None = None, *, spins: bool = True) -> None:
        self.folder, self.num_threads, self.spins = Path(folder), num_threads, spins
        self.manifest: Manifest = read_manifest(self.folder)
        self.vocab_size, self.longest_text = self.manifest.vocab_size, self.manifest.n_positions
        self._inputs = graph_tensors(self.manifest.state)
        self._sessions: dict[tuple[str, int | None], onnxruntime.InferenceSession] = {}
        self._graph("step.onnx")

    @cached_property
    def codec(self) -> TextCodec:
        """The tokenizer of the model."""
        tokenizer = plain_tokenizer((self.folder / "tokenizer.json").read_text(encoding="utf-8"))
        return TextCodec(tokenizer, self.manifest.end_id, self.manifest.pad_id, self.manifest.eos_id)

    @property
    def owner(self) -> StateOwner:
        """The description of the model's state files."""
        return StateOwner(self.manifest.model_hash, self.vocab_size, self.longest_text, self.manifest.state)

    def _graph(self, name: str) -> onnxruntime.InferenceSession:
        """A graph, loaded for as many threads as there are free cores; a loaded graph keeps its number of threads."""
        threads, free = self.num_threads, free_cores()
        if free < min(threads or free + 1, available_cores()):
            threads = 1 << (free.bit_length() - 1)  # powers of two, so that few copies are loaded
        if (name, threads) not in self._sessions:
            if self._sessions and read_manifest(self.folder) != self.manifest:
                raise OSError(f"export: {self.folder} was replaced by another export; open it again")
            self._sessions[name, threads] = self._session(name, threads)
        return self._sessions[name, threads]

    def _session(self, name: str, num_threads: int | None) -> onnxruntime.InferenceSession:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.add_session_config_entry("session.intra_op.allow_spinning", str(int(self.spins)))
        if num_threads is not None:
            options.intra_op_num_threads = num_threads
        path = self.folder / name
        with as_input_error(lambda reason: f"export: {path} cannot be loaded ({reason}); export the model again"):
            session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        names = [given.name for given in session.get_inputs()]
        leading = _LEADING[name]
        if self.manifest.match is not None:
            leading = [leading[0], *MATCH_INPUTS, *leading[1:]]
        expected = [*leading, *(about.name for about in self._inputs)]
        outputs = [given.name for given in session.get_outputs()]
        if names != expected or outputs != ["logits", *(f"new.{about.name}" for about in self._inputs)]:
            raise InputError(f"export: {path} does not fit {MANIFEST} beside it; export the model again")
        return session

    def new_state(self, num_rows: int = 1) -> OnnxState:
        """A state of `num_rows` rows that have read nothing."""
        return OnnxState.empty(self._inputs, num_rows)

    def read(self, state: OnnxState, token_ids: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """Read the next tokens of each row; return the logits after each row's last token, (rows, V).

        Raises:
            InputError: a row longer than the model can read.
            OSError: another export has replaced the opened export.
        """
        counts = np.array([len(row) for row in token_ids])
        length, most = int((state.num_read + counts).max(initial=0)), int(counts.max(initial=0))
        if self.longest_text is not None and length > self.longest_text:
            raise InputError(
                f"n_positions: the text has {length} tokens, but this model reads at most {self.longest_text} "
                "(n_positions)"
            )
        size = 1 if most <= SHORT and (counts == most).all() else self.manifest.prompt_columns
        logits = np.zeros((len(token_ids), self.vocab_size), np.float32)
        for first in range(0, most, size):
            rows = [row[first : first + size] for row in token_ids]
            num_new = np.array([len(row) for row in rows], np.int64)
            if (num_new == 1).all():
                logits = self._run("step.onnx", state, np.array(rows, np.int64), None)
                continue
            ids = np.zeros((len(rows), size), np.int64)
            for target, row in zip(ids, rows, strict=True):
                target[: len(row)] = row
            after = self._run("prompt.onnx", state, ids, num_new)
            logits[num_new > 0] = after[num_new > 0]
        return logits

    def _run(
        self, graph: str, state: OnnxState, ids: NDArray[np.int64], num_new: NDArray[np.int64] | None
    ) -> NDArray[np.float32]:
        """Run a graph, and write the tensors that it returns into the state."""
        counts = np.ones(len(ids), np.int64) if num_new is None else num_new
        state.grow(int((state.num_read + counts).max()))
        feed = {"input_ids": ids, "num_read": state.num_read, **state.tensors}
        if num_new is not None:
            feed["num_new"] = num_new
        texts = state.texts
        if self.manifest.match is not None:
            texts = self._look_up(texts, ids, counts, feed)
        logits, *new = self._graph(graph).run(None, feed)
        state.add(ids, counts, new)
        state.texts = texts
        result: NDArray[np.float32] = logits
        return result

    def _look_up(
        self, texts: list[str], ids: NDArray[np.int64], counts: NDArray[np.int64], feed: dict[str, NDArray[Any]]
    ) -> list[str]:
        """Add the longest matches of the first `counts` tokens of each row to `feed`; return the texts after them."""
        assert self.manifest.match is not None
        after, (predicted, length) = list[str](), np.zeros((2, *ids.shape), np.int64)
        for row, (text, count) in enumerate(zip(texts, counts.tolist(), strict=True)):
            text, *found = read_tokens(text, ids[row, :count].tolist(), **self.manifest.match)
            predicted[row, :count], length[row, :count] = found
            after.append(text)
        feed |= zip(MATCH_INPUTS, (predicted, length), strict=True)
        return after

    def num_read(self, state: OnnxState) -> list[int]:
        """Tokens read by each row."""
        counts: list[int] = state.num_read.tolist()
        return counts

    def save(self, state: OnnxState) -> StateContents:
        """A copy of the state as the content of a file."""
        return StateContents(state.contents(self.manifest.state))

    def restore(self, contents: StateContents) -> OnnxState:
        """The state from the result of `save`."""
        return OnnxState.from_contents(self._inputs, contents.tensors)


def _slot_axis(about: StateTensor) -> int:
    return 2 if about.is_multiplied else 1


def _slots_first(tensor: NDArray[Any], about: StateTensor) -> NDArray[Any]:
    """Turn a ring as graphs have it into a view (rows, slots, ...), or such a view into a ring."""
    return tensor.swapaxes(1, 2) if about.is_multiplied else tensor


def _num_slots(about: StateTensor, num_tokens: int) -> int:
    """The number of slots that a ring needs for `num_tokens` tokens, at most the slots of a full ring."""
    return min(max(FEWEST_SLOTS, 1 << (num_tokens - 1).bit_length()), about.shape[0])


def _as_ring(tensor: NDArray[Any], about: StateTensor, num_read: NDArray[np.int64]) -> NDArray[Any]:
    """A ring from all slots of PyTorch's state, with as few slots as possible."""
    num_slots = _num_slots(about, max(int(num_read.max(initial=0)), 1))
    ring: NDArray[Any] = tensor[:, :num_slots]
    if about.kind == "window":
        index = about.shape[0] - 1 - (num_read[:, None] - 1 - np.arange(num_slots)) % num_slots
        ring = tensor[np.arange(len(tensor))[:, None], index]
    return ring


def _advance_hashes(hashes: NDArray[np.int64], ids: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
    """Update the hashes with new tokens in place, as `multilin.model.embedding.hash_tokens` does."""
    with np.errstate(over="ignore"):
        for column in range(ids.shape[1]):
            is_read = counts > column
            if not is_read.any():
                return
            after = (
                hashes.astype(np.uint64) * _HASH_FACTOR + ids[:, column].astype(np.uint64) + np.uint64(1)
            ) & _HASH_MASK
            hashes[is_read] = after.astype(np.int64)[is_read]
