"""The content of a model's state, whatever computed it: numpy tensors and a description of each."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class StateTensor:
    """The description of a tensor of a model's state.

    name: see `TextState.named_tensors`.
    shape: shape of one row.
    dtype: "float32", "float64" or "int64".
    kind: "window" holds the last tokens in order, "positions" the token at position n in slot n; the first axis of both
        is that of the slots, and an empty slot has a logit of -inf, other values 0. A "summary" has no slots, and
        "count" is the number of tokens read.
    is_multiplied: in graphs the axis of heads comes before that of slots, (rows, heads, slots, ...).
    """

    name: str
    shape: list[int]
    dtype: str
    kind: Literal["window", "positions", "summary", "count"]
    is_multiplied: bool = False

    @property
    def is_ring(self) -> bool:
        """True if it has slots, of which only the filled ones need be kept."""
        return self.kind in ("window", "positions")

    @property
    def empty(self) -> float:
        """The value of an empty slot."""
        return -np.inf if self.name.rpartition(".")[2].startswith("logits") else 0.0

    def filled(self, tensor: NDArray[Any], num_slots: int) -> NDArray[Any]:
        """The slots of (rows, slots, ...) that are filled after `num_slots` tokens."""
        if self.kind == "window":
            return tensor[:, max(tensor.shape[1] - num_slots, 0) :]
        return tensor[:, :num_slots]

    def whole(self, tensor: NDArray[Any]) -> NDArray[Any]:
        """All slots, from the filled ones."""
        missing = self.shape[0] - tensor.shape[1]
        if not missing:
            return tensor
        edges = (missing, 0) if self.kind == "window" else (0, missing)
        return np.pad(tensor, [(0, 0), edges, *[(0, 0)] * (tensor.ndim - 2)], constant_values=self.empty)


class StateOwner(NamedTuple):
    """The model that states belong to.

    hash: see `model_hash`.
    vocab_size: V.
    n_positions: tokens of the longest sequence, None for no limit.
    tensors: descriptions of the tensors of its state.
    """

    hash: str
    vocab_size: int
    n_positions: int | None
    tensors: Sequence[StateTensor]


@dataclass
class StateContents:
    """The content of a state file.

    tensors: tensors by name, (rows, ...).
    unread_ids: for each row its tokens that were not read yet.
    rng_state: state of PyTorch's default generator on a CPU, (5056,) uint8, or None.
    """

    tensors: dict[str, NDArray[Any]]
    unread_ids: list[list[int]] = field(default_factory=list)
    rng_state: NDArray[np.uint8] | None = None
