"""The engine that runs a model in PyTorch: our models with our states, other models with transformers' caches.

On a GPU, this engine decodes by CUDA graphs: the kernels of one token are started together instead of one by one.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from multilin.errors import InputError
from multilin.inference.snapshot import Snapshot, from_contents, state_owner, to_contents
from multilin.inference.state_file import StateContents, StateOwner
from multilin.layers.plain import has_plain_modules
from multilin.model import MultilinForCausalLM, TextState
from multilin.model.state import open_state, tensors_of
from multilin.ops.dispatch import warn_once
from multilin.ops.threads import adapt
from multilin.runs.load import longest_text

PIECE = 4096  # tokens of a prompt read at once
WARM_UPS = 3  # calls of a task before it is captured
CALLS_BEFORE_CAPTURE = 8  # calls with a number of rows before its graph is captured, which takes as long as many calls
MOST_GRAPHS = 64  # most graphs to keep; a new one replaces the least recently used one
MOST_MEMORY = 1 / 16  # of the GPU's memory, for the states of all graphs; copying more costs more than graphs save


class TorchEngine:
    """An engine that runs the model in PyTorch. Only multilin's models can have rows of different lengths."""

    name = "torch"

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.kind = model.eval(), str(model.config.model_type)
        self.vocab_size = int(model.config.vocab_size)
        self.longest_text = longest_text(model.config)
        self.keeps_states = isinstance(model, MultilinForCausalLM)
        is_ours = isinstance(model, MultilinForCausalLM) and not has_plain_modules(model)
        is_graphed = is_ours and model.device.type == "cuda"
        self.graphs = DecodingGraphs(model) if is_graphed else None

    @property
    def owner(self) -> StateOwner:
        """The description of the model's state files."""
        return state_owner(self.model)

    def new_state(self, num_rows: int = 1) -> Any:
        """A state of `num_rows` rows that have read nothing."""
        return self.model.new_state() if self.keeps_states else DynamicCache(config=self.model.config)

    @torch.inference_mode()
    def read(self, state: Any, token_ids: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """Read the next tokens of each row; return the logits after each row's last token, (rows, V)."""
        counts = [len(row) for row in token_ids]
        longest = max(counts)
        logits = np.zeros((len(token_ids), self.vocab_size), np.float32)
        for first in range(0, longest, PIECE):
            adapt()
            rows = [list(row[first : first + PIECE]) for row in token_ids]
            width = max(map(len, rows))
            ids = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=self.model.device)
            ends = [bool(row) for row in rows]
            logits_BV = None
            if self.graphs is not None and width == 1 and all(ends):
                logits_BV = self.graphs.read(state, ids)
            if logits_BV is None:
                logits_BV = self._call(state, ids, rows)
            logits[ends] = logits_BV.cpu().numpy()[ends]
        return logits

    def _call(self, state: Any, ids: Tensor, rows: list[list[int]]) -> Tensor:
        """Logits (B, V) after the last token of each row; `ids` are the rows with padding at their ends."""
        given: dict[str, Any] = {"past_key_values": state, "use_cache": True, "logits_to_keep": 1}
        width = ids.shape[1]
        if any(len(row) < width for row in rows):
            mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
            given["attention_mask"] = mask.to(ids.device)
        logits_BV: Tensor = self.model(ids, **given).logits[:, -1].float()
        return logits_BV

    def num_read(self, state: Any) -> list[int]:
        """Tokens read by each row."""
        if not self.keeps_states:
            return [int(state.get_seq_length())]
        return [] if state.num_tokens is None else state.num_tokens.tolist()

    def save(self, state: TextState) -> StateContents:
        """A copy of the state as the content of a file."""
        contents = to_contents(Snapshot(state))
        contents.tensors = {name: tensor.copy() for name, tensor in contents.tensors.items()}
        return contents

    def restore(self, contents: StateContents) -> TextState:
        """The state from the result of `save`.

        Raises:
            InputError: the model keeps no state that could be restored.
        """
        if not isinstance(self.model, MultilinForCausalLM):
            raise InputError(f"state: a {self.kind} model keeps no state that a file could hold; leave it out")
        return from_contents(contents, self.model).state


def captured(task: Callable[[], object], device: torch.device | None = None) -> Callable[[], object]:
    """Capture the kernels of a task as one CUDA graph; calling the result starts them again, on the same memory.

    The task is called several times before it is captured, so that kernels are compiled and libraries ready.

    Args:
        task: starts kernels on one GPU.
        device: this GPU; None is the current GPU.

    Raises:
        RuntimeError: the task waits for the GPU, or does something else that a graph cannot hold.
    """
    with torch.cuda.device(device):
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        stream = torch.cuda.Stream(before.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(before)
        try:
            with torch.cuda.stream(stream):
                for _ in range(WARM_UPS):
                    task()
            before.wait_stream(stream)
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                task()
        except RuntimeError:
            torch.cuda.set_stream(before)  # a failed capture leaves its own stream
            raise

    def replay() -> None:
        with torch.cuda.device(device):
            graph.replay()

    return replay


class DecodingGraphs:
    """The graphs of a model, one for each number of rows that are decoded together.

    Each graph reads and writes a state at fixed addresses. A few kernels copy the small state of a sequence to these
    addresses before each token, and back afterwards. Between tokens, the caller may do anything with the sequence's
    state.

    model: decodes one token of each row.
    capture: see `captured`; tests replace it where there is no GPU.
    most_bytes: most bytes of the states of all graphs; None is `MOST_MEMORY` of the model's GPU.
    """

    def __init__(
        self,
        model: MultilinForCausalLM,
        capture: Callable[[Callable[[], object], torch.device], Any] = captured,
        most_bytes: int | None = None,
    ) -> None:
        self.model, self.capture = model, capture
        if most_bytes is None:
            most_bytes = int(torch.cuda.get_device_properties(model.device).total_memory * MOST_MEMORY)
        self.most_bytes = most_bytes
        self._calls: Counter[int] = Counter()
        self._graphs: dict[int, _Graph] = {}  # the graph used last is at the end
        self._failed = False

    def read(self, state: TextState, ids_B1: Tensor) -> Tensor | None:
        """Read one token of each row as the model does, changing the state in place.

        Call it in `torch.inference_mode`.

        Returns:
            Logits (B, V), float32, overwritten by the next call with as many rows; None if the model has to be called:
            for the first tokens of a text, near n_positions, with a large state or a recording state, and if no graph
            can be made.

        Raises:
            InputError: the state belongs to another model, or has another number of rows.
        """
        num_rows = len(ids_B1)
        open_state(state, self.model.model.layer_kinds, num_rows)
        if self._failed or state.num_tokens is None or state.is_recording or not self._has_room(state.num_tokens):
            return None
        self._calls[num_rows] += 1
        graph = self._graphs.pop(num_rows, None) or self._make(state, num_rows)
        if graph is None:
            return None
        self._graphs[num_rows] = graph
        return graph.read(state, ids_B1)

    def _has_room(self, num_read_B: Tensor) -> bool:
        """Whether every row can read as many further tokens as the warm-up reads."""
        limit = self.model.config.n_positions
        return limit is None or int(num_read_B.max()) + WARM_UPS <= limit

    def _make(self, state: TextState, num_rows: int) -> "_Graph | None":
        """Make the graph for `num_rows` rows; None after too few calls, or if memory or model do not allow it."""
        size = _num_bytes(state)
        if self._calls[num_rows] <= CALLS_BEFORE_CAPTURE or size > self.most_bytes:
            return None
        while len(self._graphs) >= MOST_GRAPHS or size + self._num_bytes() > self.most_bytes:
            oldest = next(iter(self._graphs))
            del self._graphs[oldest], self._calls[oldest]
        try:
            return _Graph(self.model, state, num_rows, self.capture)
        except torch.OutOfMemoryError:
            self.most_bytes = self._num_bytes()  # existing graphs stay
            warn_once(f"no memory for a CUDA graph of {num_rows} rows; they are decoded more slowly, kernel by kernel")
        except RuntimeError as error:
            self._failed = True
            self._graphs.clear()
            reason = str(error).strip().splitlines()[0]
            warn_once(
                f"no CUDA graph can be made of this model ({reason}); it is decoded more slowly, kernel by kernel"
            )
        return None

    def _num_bytes(self) -> int:
        return sum(_num_bytes(graph.state) for graph in self._graphs.values())


class _Graph:
    """A graph that reads one token of each row, and the memory that the graph reads and writes."""

    def __init__(
        self, model: MultilinForCausalLM, state: TextState, num_rows: int, capture: Callable[..., Any]
    ) -> None:
        state.begin_reading(1, is_plain=True)  # from now on windows are rings
        self.model, self.state = model, state.clone()
        self.ids_B1 = torch.zeros(num_rows, 1, dtype=torch.long, device=model.device)
        self.logits_BV = torch.empty(num_rows, model.config.vocab_size, device=model.device)
        self.replay = capture(self._decode, model.device)

    def _decode(self) -> None:
        """Read `ids_B1`, and copy the new tensors of the state over the old tensors, which the next token reads."""
        before = self.state.parts
        given: dict[str, Any] = {"past_key_values": self.state, "use_cache": True, "logits_to_keep": 1}
        self.logits_BV.copy_(self.model(self.ids_B1, **given).logits[:, -1])
        _copy(before, self.state.parts)
        self.state.parts = before

    def read(self, state: TextState, ids_B1: Tensor) -> Tensor:
        """See `DecodingGraphs.read`."""
        given, own = state.begin_reading(1, is_plain=True), self.state.parts
        _copy(own, given)
        self.ids_B1.copy_(ids_B1)
        self.replay()
        _copy(given, own)
        state.num_columns += 1
        return self.logits_BV


def _num_bytes(state: TextState) -> int:
    return sum(tensor.nbytes for tensor in tensors_of(state.parts))


def _copy(targets: list[Any], sources: list[Any]) -> None:
    """Copy every tensor of a state into the same tensor of another state, all tensors of a dtype together."""
    by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(tensors_of(targets), tensors_of(sources), strict=True):
        if target.data_ptr() != source.data_ptr():
            pair = by_dtype.setdefault(target.dtype, ([], []))
            pair[0].append(target)
            pair[1].append(source)
    for pair in by_dtype.values():
        torch._foreach_copy_(*pair)
