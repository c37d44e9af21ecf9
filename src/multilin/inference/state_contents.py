"""What a state consists of, whatever computed it: numpy tensors and what is said of each."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray


class StateTensor(NamedTuple):
    """A tensor of a model's state.

    name: as `TextState.named_tensors` has it.
    shape: of a row.
    dtype: "float32", "float64" or "int64".
    kind: "window" holds the last tokens in their order, "positions" the token at position n in slot n; their first axis
        is that of the slots, and a logit of -inf or 0 elsewhere stands for no token. "summary" is as it is, "count" the
        number of tokens read.
    is_multiplied: the slots of each head lie side by side where graphs read it, (rows, heads, slots, ...).
    """

    name: str
    shape: list[int]
    dtype: str
    kind: Literal["window", "positions", "summary", "count"]
    is_multiplied: bool = False

    @property
    def is_ring(self) -> bool:
        """Whether it has slots, of which only the filled ones need be kept."""
        return self.kind in ("window", "positions")

    @property
    def empty(self) -> float:
        """What stands where no token was read."""
        return -np.inf if self.name.rpartition(".")[2].startswith("logits") else 0.0

    def filled(self, tensor: NDArray[Any], num_slots: int) -> NDArray[Any]:
        """The part of (rows, slots, ...) that holds the last, or the first, so many tokens."""
        if self.kind == "window":
            return tensor[:, max(tensor.shape[1] - num_slots, 0) :]
        return tensor[:, :num_slots]

    def whole(self, tensor: NDArray[Any]) -> NDArray[Any]:
        """All slots from the filled part."""
        missing = self.shape[0] - tensor.shape[1]
        if not missing:
            return tensor
        edges = (missing, 0) if self.kind == "window" else (0, missing)
        return np.pad(tensor, [(0, 0), edges, *[(0, 0)] * (tensor.ndim - 2)], constant_values=self.empty)


class StateOwner(NamedTuple):
    """The model that states belong to.

    hash: `model_hash` of it.
    vocab_size: V.
    n_positions: tokens of the longest sequence, None for no limit.
    tensors: of its state.
    """

    hash: str
    vocab_size: int
    n_positions: int | None
    tensors: Sequence[StateTensor]


@dataclass
class StateContents:
    """What a state file holds.

    tensors: by name, (rows, ...).
    unread_ids: tokens of each row that were not read yet.
    rng_state: of PyTorch's default generator on a CPU, (5056,) uint8, or None.
    """

    tensors: dict[str, NDArray[Any]]
    unread_ids: list[list[int]] = field(default_factory=list)
    rng_state: NDArray[np.uint8] | None = None
