"""The data of the scheduler: prompts, the sequences that continue them, and the events that are reported."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from multilin.inference.sampling import RandomNumbers
from multilin.inference.settings import GenerationSettings
from multilin.inference.state_file import StateContents
from multilin.inference.text import TextStream

IMPOSSIBLE = -9999.0  # stands for the logarithm of 0, as in OpenAI's API, since JSON has no infinity


class Logprob(NamedTuple):
    """A token and the logarithm of its probability, before penalties, bias and temperature.

    top: the likeliest tokens and the logarithms of their probabilities.
    """

    token_id: int
    value: float | None
    top: list[tuple[int, float]]


class Piece(NamedTuple):
    """New text of a sequence, which later tokens cannot change, and its tokens if tokens are reported.

    tokens: pairs of a token and the number of new characters before it; the number is -1 for tokens of the prompt.
    """

    text: str
    tokens: list[tuple[Logprob, int]]


class End(NamedTuple):
    """The end of a sequence.

    finish_reason: "stop" or "length".
    num_generated: number of tokens generated.
    token_ids: the new tokens of the text, without an end-of-text token or a stop string.
    state: engine state, with one row, after the prompt and all `token_ids` except the last `num_unread` were read.
    """

    finish_reason: str
    num_generated: int
    token_ids: list[int]
    state: Any
    num_unread: int


Event = Piece | End | Exception


@dataclass(eq=False)
class Job:
    """A prompt and the sequences that continue it.

    owner: the user; jobs of different users take turns.
    token_ids: tokens to read after the state `start`.
    known_ids: all known tokens up to the end of the prompt, for the repetition penalty and as context for decoding.
    start: the state to continue; None at the start of a text.
    settings: settings of each sequence.
    max_new_tokens: most new tokens of each sequence; may be 0.
    listen: called with the number of the sequence and an event, in the thread that the scheduler's `notify` chooses.
    num_logprobs: number of likeliest tokens to report for each new token; None reports no tokens.
    prompt_logprobs: number of tokens at the end of the prompt that are reported too.
    ends: tokens that end an answer, in addition to the end-of-text token.
    position: number of `token_ids` that have been read so far.
    state: engine state, with one row, while the prompt is read.
    """

    owner: str
    token_ids: list[int]
    known_ids: Sequence[int]
    start: StateContents | None
    settings: list[GenerationSettings]
    max_new_tokens: int
    listen: Callable[[int, Event], None]
    num_logprobs: int | None = None
    prompt_logprobs: int = 0
    ends: frozenset[int] = frozenset()
    is_cancelled: bool = False
    position: int = 0
    state: Any = None

    @property
    def is_new(self) -> bool:
        """True if no token of the text has been read."""
        return self.state is None and self.start is None


class Kept(NamedTuple):
    """The engine state and the counts before an incomplete character or a possible stop string."""

    state: Any
    num_tokens: int
    num_characters: int


@dataclass(eq=False)
class Row:
    """A sequence in the batch.

    index: number of the sequence in its job.
    numbers: random numbers for sampling.
    seen: tokens of the text so far, and how often each was generated.
    forced: tokens of the prompt that are read one by one, because their probabilities are reported.
    next_id: the token that is read next.
    token_ids: the tokens that were generated.
    pending: tokens that wait until their text is certain, each with the number of characters before it.
    kept: the state to restore if a possible stop string is completed, or if the row ends before the text is whole; None
        while the text is whole.
    end: the finish reason; None while the sequence runs.
    """

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


class Counts(NamedTuple):
    """The numbers of waiting jobs, of jobs whose prompts are being read, and of running sequences."""

    waiting: int
    reading: int
    running: int


def make_logprob(logits_V: NDArray[np.float32], token: int, num_top: int) -> Logprob:
    """The log probabilities of a token and of the `num_top` likeliest tokens; no value is below `IMPOSSIBLE`."""
    logits = logits_V.astype(np.float64)
    logits -= logits.max()
    logits = np.maximum(logits - np.log(np.exp(logits).sum()), IMPOSSIBLE)
    top = np.argpartition(-logits, min(num_top, len(logits) - 1))[:num_top] if num_top else np.zeros(0, np.int64)
    top = top[np.argsort(-logits[top], kind="stable")]
    return Logprob(token, float(logits[token]), [(int(index), float(logits[index])) for index in top])
