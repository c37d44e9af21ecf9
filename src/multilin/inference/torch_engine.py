"""The engine that runs a model in PyTorch: our models with our states, others with the caches of transformers."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from multilin.errors import InputError
from multilin.inference.cuda_graphs import DecodingGraphs
from multilin.inference.snapshot import Snapshot, from_contents, state_owner, to_contents
from multilin.inference.state_contents import StateContents, StateOwner
from multilin.model import MultilinForCausalLM, TextState
from multilin.ops.threads import adapt
from multilin.runs.load import longest_text

PIECE = 4096  # tokens of a prompt read at once


class TorchEngine:
    """See `multilin.inference.engine.Engine`. Only our models can have rows of different lengths."""

    name = "torch"

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.kind = model.eval(), str(model.config.model_type)
        self.vocab_size = int(model.config.vocab_size)
        self.longest_text = longest_text(model.config)
        self.keeps_states = isinstance(model, MultilinForCausalLM)
        is_graphed = isinstance(model, MultilinForCausalLM) and model.device.type == "cuda"
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
        """Read the next tokens of each row; the logits after each row's last, (rows, V)."""
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
        """The state from what `save` returned.

        Raises:
            InputError: the model keeps no state that could be restored.
        """
        if not isinstance(self.model, MultilinForCausalLM):
            raise InputError(f"state: a {self.kind} model keeps no state that a file could hold; leave it out")
        return from_contents(contents, self.model).state
