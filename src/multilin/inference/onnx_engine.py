"""The engine that runs an exported model in ONNX Runtime, without PyTorch."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from multilin.data.encoding import plain_tokenizer
from multilin.errors import InputError, as_input_error
from multilin.inference.manifest import Manifest, graph_tensors, read_manifest
from multilin.inference.onnx_state import OnnxState
from multilin.inference.state_contents import StateContents, StateOwner
from multilin.inference.text import TextCodec
from multilin.ops.threads import available_cores, free_cores
from multilin.runs.files import MANIFEST

onnxruntime.disable_telemetry_events()  # nothing about a model leaves the machine

SHORT = 4  # tokens that are read one by one: loading the graph of longer pieces takes longer
_LEADING = {"step.onnx": ["input_ids", "num_read"], "prompt.onnx": ["input_ids", "num_new", "num_read"]}  # inputs


class OnnxEngine:
    """See `multilin.inference.engine.Engine`.

    Args:
        folder: the folder that `multilin export` wrote.
        num_threads: threads that compute a step; None leaves their number to ONNX Runtime.
        spins: threads that wait keep their cores busy, which is faster if nothing else needs them.

    Raises:
        InputError: no export there, one of another version, or one whose files do not fit together.
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
        """A graph, loaded for as many threads as there are free cores; a loaded graph cannot change their number."""
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
        expected = [*_LEADING[name], *(about.name for about in self._inputs)]
        outputs = [given.name for given in session.get_outputs()]
        if names != expected or outputs != ["logits", *(f"new.{about.name}" for about in self._inputs)]:
            raise InputError(f"export: {path} does not fit {MANIFEST} beside it; export the model again")
        return session

    def new_state(self, num_rows: int = 1) -> OnnxState:
        """A state of `num_rows` rows that have read nothing."""
        return OnnxState.empty(self._inputs, num_rows)

    def read(self, state: OnnxState, token_ids: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """Read the next tokens of each row; the logits after each row's last, (rows, V).

        Raises:
            InputError: a row longer than the model can read.
            OSError: another export has replaced the one that was opened.
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
        logits, *new = self._graph(graph).run(None, feed)
        state.add(ids, counts, new)
        result: NDArray[np.float32] = logits
        return result

    def num_read(self, state: OnnxState) -> list[int]:
        """Tokens read by each row."""
        counts: list[int] = state.num_read.tolist()
        return counts

    def save(self, state: OnnxState) -> StateContents:
        """A copy of the state as the content of a file."""
        return StateContents(state.contents(self.manifest.state))

    def restore(self, contents: StateContents) -> OnnxState:
        """The state from what `save` returned."""
        return OnnxState.from_contents(self._inputs, contents.tensors)
