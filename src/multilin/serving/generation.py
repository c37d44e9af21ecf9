"""Requests for text and their sequences, as the event loop sees them."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from multilin.inference.settings import GenerationSettings
from multilin.serving.jobs import End, Event, Job, Piece
from multilin.serving.metrics import Metrics
from multilin.serving.scheduler import Scheduler
from multilin.serving.sessions import Session
from multilin.serving.turns import Turn

PAUSE, PAUSE_EACH = 0.02, 0.001  # least seconds between pieces of a stream, and extra seconds per running sequence


@dataclass(frozen=True)
class Prompt:
    """A text to continue.

    text: the prompt as clients see it in the turn.
    token_ids: tokens of the whole text or, if there is a turn `before`, only the tokens after that turn.
    before: the turn that is continued.
    messages: all messages of the conversation; None if the text is no conversation.
    has_start: whether a start token was put before the client's text.
    """

    text: str
    token_ids: list[int]
    before: Turn | None
    messages: list[dict[str, str]] | None = None
    has_start: bool = False


@dataclass(frozen=True)
class Ask:
    """A request for text.

    kind: see `Turn`.
    settings: settings of the n sequences that continue each prompt.
    max_tokens: most new tokens of each sequence; None takes `default_tokens`, or fewer if the model can read no more.
    limit_name: the field of the request that gave `max_tokens`, for error messages.
    num_logprobs, prompt_logprobs: see `Job`.
    store: whether the turns are kept.
    session: the session to which the turn is added.
    is_streamed: whether text is sent to the client while it is generated.
    """

    kind: str
    owner: str
    prompts: list[Prompt]
    settings: list[GenerationSettings]
    max_tokens: int | None
    default_tokens: int
    limit_name: str
    num_logprobs: int | None
    prompt_logprobs: bool
    store: bool
    session: Session | None
    is_streamed: bool


@dataclass
class Result:
    """The part of a sequence that has been generated so far.

    tokens: see `Piece`.
    turn: id of the turn; None if the turn was not kept.
    """

    text: str = ""
    tokens: list[Any] = field(default_factory=list)
    finish_reason: str | None = None
    num_generated: int = 0
    turn: str | None = None


class Generation:
    """The sequences of a request, as the event loop sees them.

    Args:
        ask: the request.
        scheduler: runs the jobs.
        metrics: counts the tokens.
        on_end: called in a thread when a sequence has ended, before the client learns of it.
        on_close: called when the request is over, however it ended.
    """

    def __init__(
        self, ask: Ask, scheduler: Scheduler, metrics: Metrics,
        on_end: "Callable[[Generation, int, End], None]", on_close: Callable[[], object],
    ) -> None:  # fmt: skip
        self.ask, self.jobs, self._scheduler, self._metrics = ask, list[Job](), scheduler, metrics
        self._on_end, self._on_close = on_end, on_close
        self.parents: list[Turn | None] = []  # for each prompt, the turn that it continues
        self.num_prompt_tokens = self.num_cached_tokens = 0
        self.results = [Result() for _ in range(len(ask.prompts) * len(ask.settings))]
        self.changed, self._next_time = asyncio.Event(), 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.is_abandoned = self.is_finished = False
        self._received: deque[tuple[int, Event]] = deque()
        self._begun: float | None = time.monotonic()

    @property
    def num_generated(self) -> int:
        """The number of new tokens of all sequences that have ended."""
        return sum(result.num_generated for result in self.results)

    def receive(self, index: int, event: Event) -> None:
        """Handle an event of a sequence."""
        if self._begun is not None:
            self._metrics.first_token.observe(time.monotonic() - self._begun)
            self._begun = None
        self._received.append((index, event))
        if not isinstance(event, Piece):
            self.changed.set()
        elif self.ask.is_streamed and self._timer is None:
            # Pieces that arrive at short intervals are sent as one: sending takes longer than generating a token.
            self._timer = asyncio.get_running_loop().call_at(self._next_time, self.changed.set)

    def abandon(self) -> None:
        """End the iteration over `pieces`, because the client has disconnected."""
        self.is_abandoned = True
        self.changed.set()

    def finish(self) -> None:
        """End all sequences with the tokens generated so far, and keep their turns."""
        self.is_finished = True
        for job in self.jobs:
            self._scheduler.finish(job)

    def close(self) -> None:
        """Cancel the sequences that have not ended."""
        for job in self.jobs:
            self._scheduler.cancel(job)
        self._on_close()

    async def pieces(self, silence: float) -> AsyncIterator[dict[int, Piece]]:
        """Yield new text by sequence number until all sequences have ended or the client has disconnected.

        Yields an empty dictionary after every `silence` seconds without new text.
        """
        while any(result.finish_reason is None for result in self.results):
            try:
                async with asyncio.timeout(silence):
                    await self.changed.wait()
            except TimeoutError:
                yield {}
                continue
            self.changed.clear()
            self._timer = None
            pause = PAUSE + PAUSE_EACH * self._scheduler.counts.running
            self._next_time = asyncio.get_running_loop().time() + pause
            if self.is_abandoned:
                return
            new: dict[int, Piece] = {}
            ended: list[tuple[int, End]] = []
            while self._received:
                index, event = self._received.popleft()
                if isinstance(event, Exception):
                    raise event
                text, tokens = new.setdefault(index, Piece("", []))
                if isinstance(event, End):
                    ended.append((index, event))
                    continue
                new[index] = Piece(text + event.text, [*tokens, *event.tokens])
                self.results[index].text += event.text
                self.results[index].tokens += event.tokens
            for index, end in ended:
                result = self.results[index]
                result.num_generated, result.finish_reason = end.num_generated, end.finish_reason
                await asyncio.to_thread(self._on_end, self, index, end)
            yield new
        self._metrics.add_request(self.num_prompt_tokens, self.num_cached_tokens, self.num_generated)
