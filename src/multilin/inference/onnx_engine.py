"""The engine that runs an exported model in ONNX Runtime, without PyTorch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from multilin.errors import InputError
from multilin.inference.manifest import Manifest, read_manifest
from multilin.inference.run_files import MANIFEST
from multilin.inference.state_file import StateContents, StateOwner, StateTensor
from multilin.inference.text import TextCodec
from multilin.ops.threads import available_cores, free_cores

onnxruntime.disable_telemetry_events()  # nothing about a model leaves the machine

FEWEST_SLOTS = 64  # of a ring that is not yet full; doubled as tokens come
SHORT = 4  # tokens that are read one by one: loading the graph of longer pieces takes longer
_LEADING = {"step.onnx": ["input_ids", "num_read"], "prompt.onnx": ["input_ids", "num_new", "num_read"]}  # inputs
_HASH_FACTOR, _HASH_MASK = np.uint64(6364136223846793005), np.uint64(2**63 - 1)


@dataclass
class OnnxState:
    """The state of some rows.

    num_read, hashes, documents: (rows,) int64, as the embedding's state in PyTorch has them.
    tensors: by name, as the graphs take them: rings of some slots, token number n in slot n mod slots, and summaries.
    room: rings with spare rows, of which those in `tensors` are the first.
    """

    num_read: NDArray[np.int64]
    hashes: NDArray[np.int64]
    documents: NDArray[np.int64]
    tensors: dict[str, NDArray[Any]]
    room: dict[str, NDArray[Any]] = field(default_factory=dict)


class OnnxEngine:
    """See `multilin.inference.engine.Engine`.

    Args:
        folder: what `multilin export` wrote.
        num_threads: that a step is computed with; None leaves it to ONNX Runtime.
        spins: threads that wait keep their cores busy, which is faster where nothing else needs them.

    Raises:
        InputError: no export there, one of another version, or one whose files do not fit together.
    """

    name, kind = "onnx", "multilin"
    keeps_states = True

    def __init__(self, folder: str | Path, num_threads: int | None = None, *, spins: bool = True) -> None:
        self.folder, self.num_threads, self.spins = Path(folder), num_threads, spins
        self.manifest: Manifest = read_manifest(self.folder)
        self.vocab_size, self.longest_text = self.manifest.vocab_size, self.manifest.n_positions
        self._inputs = self.manifest.graph_state
        self._sessions: dict[tuple[str, int | None], onnxruntime.InferenceSession] = {}
        self._graph("step.onnx")

    @cached_property
    def codec(self) -> TextCodec:
        """The tokenizer of the model."""
        return TextCodec.from_file(self.folder / "tokenizer.json", self.manifest.end_id, self.manifest.pad_id)

    @property
    def owner(self) -> StateOwner:
        """What state files of the model hold."""
        manifest = self.manifest
        return StateOwner(manifest.model_hash, manifest.vocab_size, manifest.n_positions, manifest.state)

    def _graph(self, name: str) -> onnxruntime.InferenceSession:
        """The graph, on as many threads as other programs leave cores; their number is fixed when it is loaded."""
        threads, free = self.num_threads, free_cores()
        if free < min(threads or free + 1, available_cores()):
            threads = 1 << (free.bit_length() - 1)  # powers of two, so that few copies are loaded
        if (name, threads) not in self._sessions:
            self._sessions[name, threads] = self._session(name, threads)
        return self._sessions[name, threads]

    def _session(self, name: str, num_threads: int | None) -> onnxruntime.InferenceSession:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.add_session_config_entry("session.intra_op.allow_spinning", str(int(self.spins)))
        if num_threads is not None:
            options.intra_op_num_threads = num_threads
        path = self.folder / name
        try:
            session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # the runtime's errors have no common class
            reason = " ".join(str(error).split())[:200]
            raise InputError(f"export: {path} cannot be loaded ({reason}); export the model again") from None
        names = [given.name for given in session.get_inputs()]
        expected = [*_LEADING[name], *(about.name for about in self._inputs)]
        outputs = [given.name for given in session.get_outputs()]
        if names != expected or outputs != ["logits", *(f"new.{about.name}" for about in self._inputs)]:
            raise InputError(f"export: {path} does not fit {MANIFEST} beside it; export the model again")
        return session

    def new_state(self, num_rows: int = 1) -> OnnxState:
        """The state of so many rows that have read nothing."""
        tensors = {}
        for about in self._inputs:
            shape = list(about.shape)
            if about.is_ring:
                shape[0] = min(FEWEST_SLOTS, shape[0])
            tensors[about.name] = self._laid_out(np.full((num_rows, *shape), about.empty, about.dtype), about)
        num_read, hashes, documents = np.zeros((3, num_rows), np.int64)
        return OnnxState(num_read, hashes, documents, tensors)

    def read(self, state: OnnxState, token_ids: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """Read the next tokens of each row; the logits after each row's last, (rows, V).

        Raises:
            InputError: a row longer than the model can read.
        """
        counts = np.array([len(row) for row in token_ids])
        self._check_length(state, counts)
        most = int(counts.max(initial=0))
        if 0 < most <= SHORT and (counts == most).all():
            columns = np.array(token_ids, np.int64)
            for column in range(most):
                logits = self._run("step.onnx", state, columns[:, column : column + 1], None)
            return logits
        return self._read_pieces(state, token_ids, most)

    def _read_pieces(self, state: OnnxState, token_ids: Sequence[Sequence[int]], most: int) -> NDArray[np.float32]:
        size = self.manifest.prompt_columns
        logits = np.zeros((len(token_ids), self.vocab_size), np.float32)
        for first in range(0, most, size):
            rows = [row[first : first + size] for row in token_ids]
            num_new = np.array([len(row) for row in rows], np.int64)
            if (num_new == 1).all():
                return self._run("step.onnx", state, np.array(rows, np.int64), None)
            ids = np.zeros((len(rows), size), np.int64)
            for target, row in zip(ids, rows, strict=True):
                target[: len(row)] = row
            after = self._run("prompt.onnx", state, ids, num_new)
            logits[num_new > 0] = after[num_new > 0]
        return logits

    def _run(
        self, graph: str, state: OnnxState, ids: NDArray[np.int64], num_new: NDArray[np.int64] | None
    ) -> NDArray[np.float32]:
        """Run a graph, and write what it returns into the state."""
        counts = np.ones(len(ids), np.int64) if num_new is None else num_new
        self._grow(state, int((state.num_read + counts).max()))
        feed = {"input_ids": ids, "num_read": state.num_read, **state.tensors}
        if num_new is not None:
            feed["num_new"] = num_new
        logits, *new = self._graph(graph).run(None, feed)
        for about, tensor in zip(self._inputs, new, strict=True):
            if about.is_ring:
                self._write(state, about, tensor, counts)
            else:
                state.tensors[about.name] = tensor
        _advance_hashes(state.hashes, ids, counts)
        state.num_read = state.num_read + counts
        result: NDArray[np.float32] = logits
        return result

    def _write(self, state: OnnxState, about: StateTensor, new: NDArray[Any], counts: NDArray[np.int64]) -> None:
        """Put the first `counts` new tokens of each row into their slots."""
        axis = 2 if about.is_multiplied else 1
        ring, num_slots = state.tensors[about.name], state.tensors[about.name].shape[axis]
        ring, new = (ring.swapaxes(1, 2), new.swapaxes(1, 2)) if axis == 2 else (ring, new)
        if new.shape[1] == 1 and counts.all():
            if len(ring) == 1:
                ring[0, state.num_read[0] % num_slots] = new[0, 0]
            else:
                ring[np.arange(len(ring)), state.num_read % num_slots] = new[:, 0]
            return
        for row, (begin, count) in enumerate(zip(state.num_read.tolist(), counts.tolist(), strict=True)):
            first = max(count - num_slots, 0)  # earlier ones have no place any more
            ring[row, np.arange(begin + first, begin + count) % num_slots] = new[row, first:count]

    def _grow(self, state: OnnxState, num_tokens: int) -> None:
        """Room for so many tokens in all rings, as far as they keep them."""
        for about in self._inputs:
            if not about.is_ring:
                continue
            axis, tensor = 2 if about.is_multiplied else 1, state.tensors[about.name]
            if tensor.shape[axis] >= min(num_tokens, about.shape[0]):
                continue
            num_slots = min(max(FEWEST_SLOTS, 1 << (num_tokens - 1).bit_length()), about.shape[0])
            edges = [(0, 0)] * tensor.ndim
            edges[axis] = (0, num_slots - tensor.shape[axis])
            room = state.room.get(about.name, tensor)
            state.room[about.name] = np.pad(room, edges, constant_values=about.empty)
            state.tensors[about.name] = state.room[about.name][: len(tensor)]

    def _check_length(self, state: OnnxState, counts: NDArray[np.int64]) -> None:
        length = int((state.num_read + counts).max(initial=0))
        if self.longest_text is not None and length > self.longest_text:
            raise InputError(
                f"n_positions: the text has {length} tokens, but this model reads at most {self.longest_text} "
                "(n_positions)"
            )

    def num_read(self, state: OnnxState) -> list[int]:
        """Tokens read by each row."""
        counts: list[int] = state.num_read.tolist()
        return counts

    def select(self, state: OnnxState, rows: Sequence[int]) -> OnnxState:
        """A copy of these rows in this order."""
        index = np.array(rows, np.int64)
        tensors = {name: tensor[index] for name, tensor in state.tensors.items()}
        return OnnxState(state.num_read[index], state.hashes[index], state.documents[index], tensors)

    def join(self, state: OnnxState, other: OnnxState) -> None:
        """Append the rows of another state; of rings only these rows are copied, as long as there is room."""
        num_slots = max([self._num_slots(state), self._num_slots(other)])
        self._grow(state, num_slots)
        self._grow(other, num_slots)
        before, after = len(state.num_read), len(state.num_read) + len(other.num_read)
        for about in self._inputs:
            ring, added = state.tensors[about.name], other.tensors[about.name]
            if not about.is_ring:
                state.tensors[about.name] = np.concatenate([ring, added])  # a step gives new ones anyway
                continue
            room = state.room.get(about.name, ring)
            if len(room) < after:
                room = np.empty((max(after, 2 * before), *ring.shape[1:]), ring.dtype)
                room[:before] = ring
                state.room[about.name] = room
            room[before:after] = added
            state.tensors[about.name] = room[:after]
        state.num_read = np.concatenate([state.num_read, other.num_read])
        state.hashes = np.concatenate([state.hashes, other.hashes])
        state.documents = np.concatenate([state.documents, other.documents])

    def leave(self, state: OnnxState, row: int) -> OnnxState:
        """Take a row out, as a state of its own; the last row takes its place."""
        left, last = self.select(state, [row]), len(state.num_read) - 1
        for about in self._inputs:
            tensor = state.tensors[about.name]
            if not tensor.flags.writeable:
                tensor = tensor.copy()
            tensor[row] = tensor[last]
            state.tensors[about.name] = tensor[:last]
        for name in ("num_read", "hashes", "documents"):
            tensor = getattr(state, name)
            tensor[row] = tensor[last]
            setattr(state, name, tensor[:last])
        return left

    def _num_slots(self, state: OnnxState) -> int:
        """Tokens that the largest ring has slots for."""
        sizes = [
            state.tensors[about.name].shape[2 if about.is_multiplied else 1] for about in self._inputs if about.is_ring
        ]
        return max(sizes, default=0)

    def save(self, state: OnnxState) -> StateContents:
        """The state as files hold it."""
        given = {
            "embedding.num_read_B": state.num_read,
            "embedding.document_B": state.documents,
            "embedding.hash_B": state.hashes,
        }
        tensors: dict[str, NDArray[Any]] = {}
        for about in self.manifest.state:
            if about.name in given:
                tensors[about.name] = given[about.name].copy()
            elif about.kind == "count":
                tensors[about.name] = state.num_read.copy()
            elif about.is_ring:
                tensors[about.name] = self._in_order(state, about)
            else:
                tensors[about.name] = state.tensors[about.name].copy()
        return StateContents(tensors)

    def restore(self, contents: StateContents) -> OnnxState:
        """The state that `save` gave."""
        given = contents.tensors
        num_read = given["embedding.num_read_B"]
        tensors = {}
        for about in self._inputs:
            tensor = given[about.name]
            if about.is_ring:
                tensor = self._laid_out(_as_ring(tensor, about, num_read), about)
            tensors[about.name] = np.array(tensor, about.dtype, order="C")
        num_read, hashes, documents = (
            given[f"embedding.{name}"].copy() for name in ("num_read_B", "hash_B", "document_B")
        )
        return OnnxState(num_read, hashes, documents, tensors)

    def _laid_out(self, tensor: NDArray[Any], about: StateTensor) -> NDArray[Any]:
        return np.ascontiguousarray(tensor.swapaxes(1, 2)) if about.is_multiplied else tensor

    def _in_order(self, state: OnnxState, about: StateTensor) -> NDArray[Any]:
        """A ring as PyTorch's state has it: the last tokens in their order, or each in the slot of its position."""
        ring = state.tensors[about.name]
        ring = ring.swapaxes(1, 2) if about.is_multiplied else ring
        number = np.arange(about.shape[0])[None] + np.zeros((len(ring), 1), np.int64)
        if about.kind == "window":
            number = number + state.num_read[:, None] - about.shape[0]
        is_empty = (number < 0) | (number >= state.num_read[:, None])
        taken: NDArray[Any] = ring[np.arange(len(ring))[:, None], number % ring.shape[1]]
        taken[is_empty] = about.empty
        return taken


def _as_ring(tensor: NDArray[Any], about: StateTensor, num_read: NDArray[np.int64]) -> NDArray[Any]:
    """A ring from all slots of PyTorch's state, of as few slots as hold the tokens read."""
    most = max(int(num_read.max(initial=0)), 1)
    num_slots = min(max(FEWEST_SLOTS, 1 << (most - 1).bit_length()), about.shape[0])
    ring: NDArray[Any] = tensor[:, :num_slots]
    if about.kind == "window":
        index = about.shape[0] - 1 - (num_read[:, None] - 1 - np.arange(num_slots)) % num_slots
        ring = tensor[np.arange(len(tensor))[:, None], index]
    return ring


def _advance_hashes(hashes: NDArray[np.int64], ids: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
    """As `multilin.model.embedding.hash_tokens`, in place."""
    with np.errstate(over="ignore"):
        for column in range(ids.shape[1]):
            is_read = counts > column
            if not is_read.any():
                return
            after = (
                hashes.astype(np.uint64) * _HASH_FACTOR + ids[:, column].astype(np.uint64) + np.uint64(1)
            ) & _HASH_MASK
            hashes[is_read] = after.astype(np.int64)[is_read]
