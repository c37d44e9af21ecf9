"""What a scheduler works on: prompts, the sequences that continue them, and what it tells of these."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from multilin.inference.random_numbers import RandomNumbers
from multilin.inference.settings import GenerationSettings
from multilin.inference.state_contents import StateContents
from multilin.inference.text import TextStream


class Logprob(NamedTuple):
    """A token with the logarithm of its probability, before penalties, bias and temperature.

    top: the likeliest tokens and theirs.
    """

    token_id: int
    value: float | None
    top: list[tuple[int, float]]


class Piece(NamedTuple):
    """Text that is certain, and the tokens that ended in it.

    tokens: (token, characters of the new text before it); of the prompt, the characters are negative.
    """

    text: str
    tokens: list[tuple[Logprob, int]]


class End(NamedTuple):
    """The end of a sequence.

    finish_reason: "stop" or "length".
    num_generated: tokens.
    token_ids: the new tokens that belong to the text, without an end of text or a stop string.
    state: of the engine, one row, that has read the prompt and all but the last `num_unread` of these.
    """

    finish_reason: str
    num_generated: int
    token_ids: list[int]
    state: Any
    num_unread: int


Event = Piece | End | Exception


class QueueFull(Exception):
    """As many requests wait as the queue has room for."""


class Stopped(Exception):
    """The server ends."""


@dataclass(eq=False)
class Job:
    """A prompt and the sequences that continue it.

    owner: requests of different owners take turns.
    token_ids: tokens to read, those before `start` not included.
    known_ids: all known tokens before the new ones, for the repetition penalty.
    start: the state to go on from; None at the start of a text.
    settings: of each sequence.
    max_new_tokens: for each, may be 0.
    num_logprobs: likeliest tokens to report at each place; None reports nothing.
    prompt_logprobs: report the tokens of the prompt too.
    listen: called with the number of the sequence and what happened, by the thread that `notify` leads to.
    """

    owner: str
    token_ids: list[int]
    known_ids: Sequence[int]
    start: StateContents | None
    settings: list[GenerationSettings]
    max_new_tokens: int
    listen: Callable[[int, Event], None]
    num_logprobs: int | None = None
    prompt_logprobs: bool = False
    is_cancelled: bool = False
    submitted: float = field(default_factory=time.monotonic)
    position: int = 0
    state: Any = None

    @property
    def is_new(self) -> bool:
        """Whether nothing of its text was read."""
        return self.state is None and self.start is None


class Kept(NamedTuple):
    """Where the text of a sequence was whole: no character and no stop string had begun."""

    state: Any
    num_tokens: int
    num_characters: int


@dataclass(eq=False)
class Row:
    """A sequence in the batch."""

    job: Job
    index: int
    settings: GenerationSettings
    numbers: RandomNumbers
    stream: TextStream
    seen: dict[int, int]
    forced: deque[int]
    next_id: int = 0
    token_ids: list[int] = field(default_factory=list)
    pending: list[tuple[Logprob, int]] = field(default_factory=list)
    kept: Kept | None = None
    end: str | None = None

    @property
    def has_logprobs(self) -> bool:
        """Whether logarithms of probabilities are asked for."""
        return self.job.num_logprobs is not None


class Counts(NamedTuple):
    """Jobs that wait and those whose prompts are read, and sequences that run."""

    waiting: int
    reading: int
    running: int


def make_logprob(logits_V: NDArray[np.float32], token: int, num_top: int) -> Logprob:
    """That of a token, and of so many of the likeliest."""
    logits = logits_V.astype(np.float64)
    logits -= logits.max()
    logits -= np.log(np.exp(logits).sum())
    top = np.argpartition(-logits, min(num_top, len(logits) - 1))[:num_top] if num_top else np.zeros(0, np.int64)
    top = top[np.argsort(-logits[top], kind="stable")]
    return Logprob(token, float(logits[token]), [(int(index), float(logits[index])) for index in top])
