"""The interface between generation and a model, which reads tokens into a state, and saves and loads states."""

from collections.abc import Sequence
from typing import Any, Protocol

from multilin.inference.sampling import Logits
from multilin.inference.state_file import StateContents, StateOwner


class Engine(Protocol):
    """The interface of a model for generation: it reads tokens into states.

    A state is made by `new_state` or `restore` and has one row per sequence; rows may have read different numbers of
    tokens. If the engine keeps states, `state.select(rows)` copies these rows in this order, also a row several times;
    `state.join(other)` appends the rows of another state, which must not be used afterwards; `state.leave(row)` removes
    a row, returns it as a separate state, and puts the last row in the free place.

    name: name of the engine, for messages.
    kind: `model_type` of config.json.
    vocab_size: V.
    longest_text: most tokens of a row, None for any number.
    keeps_states: whether states can be saved, forked and restored.
    """

    name: str
    kind: str
    vocab_size: int
    longest_text: int | None
    keeps_states: bool

    @property
    def owner(self) -> StateOwner:
        """The description of the model's state files.

        Raises:
            InputError: the model keeps no states.
        """

    def new_state(self, num_rows: int = 1) -> Any:
        """A state of `num_rows` rows that have read nothing."""

    def read(self, state: Any, token_ids: Sequence[Sequence[int]]) -> Logits:
        """Read the next tokens of each row into the state; return the logits after each row's last token, (rows, V).

        Rows may have different numbers of tokens. The logits of a row without tokens are 0.
        """

    def num_read(self, state: Any) -> list[int]:
        """Tokens read by each row; a state that has read nothing may list no rows."""

    def save(self, state: Any) -> StateContents:
        """A copy of the state as a file's content; the caller adds unread tokens and random numbers."""

    def restore(self, contents: StateContents) -> Any:
        """Make a state from the result of `save` of this engine or of another engine with the same model."""
