"""What generation needs of a model, whatever runs it: read tokens into a state, copy, join, save and load states."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from multilin.inference.state_contents import StateContents

Logits = NDArray[np.float32]


class Engine(Protocol):
    """A model that reads tokens into states.

    A state is made by `new_state` or `restore`; what it is only its engine knows. It holds rows of their own lengths.

    name: of the engine, for people.
    kind: of the model, as config.json has it.
    vocab_size: V.
    longest_text: tokens a row can have, None for any number.
    keeps_states: whether states can be saved, forked and restored.
    """

    name: str
    kind: str
    vocab_size: int
    longest_text: int | None
    keeps_states: bool

    def new_state(self, num_rows: int = 1) -> Any:
        """The state of so many rows that have read nothing."""
        ...

    def read(self, state: Any, token_ids: Sequence[Sequence[int]]) -> Logits:
        """Read the next tokens of each row, changing the state in place; the logits after each row's last, (rows, V).

        Rows may have different numbers of tokens, also none; the logits of such a row are 0.
        """
        ...

    def num_read(self, state: Any) -> list[int]:
        """Tokens read by each row."""
        ...

    def select(self, state: Any, rows: Sequence[int]) -> Any:
        """A copy of these rows in this order; a row may come more than once."""
        ...

    def join(self, state: Any, other: Any) -> None:
        """Append the rows of another state, which is used up; a state of no rows is one that has read nothing."""
        ...

    def leave(self, state: Any, row: int) -> Any:
        """Take a row out, as a state of its own; the last row takes its place."""
        ...

    def save(self, state: Any) -> StateContents:
        """The state as files hold it, with tensors of its own; unread tokens and random numbers are the caller's."""
        ...

    def restore(self, contents: StateContents) -> Any:
        """The state that `save` of this engine or another one with the same model gave."""
        ...
