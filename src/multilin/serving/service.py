"""What the server does with a request, whatever its shape on the wire: prompts, generation, turns and sessions."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from multilin.errors import InputError, shown
from multilin.inference.engine import Engine
from multilin.inference.generate import check_length, check_settings
from multilin.inference.settings import GenerationSettings
from multilin.inference.state_file import StateContents, StateOwner, pack_state, unpack_state
from multilin.inference.text import TextCodec
from multilin.serving.errors import NOT_FOUND, ApiError, too_busy
from multilin.serving.layout import Layout
from multilin.serving.metrics import Metrics
from multilin.serving.scheduler import End, Event, Job, Piece, QueueFull, Scheduler, Stopped
from multilin.serving.sessions import Session, SessionStore
from multilin.serving.turns import Turn, TurnStore, new_id

PAUSE, PAUSE_EACH = 0.02, 0.0005  # seconds between two pieces of a stream, and more for each sequence that runs


@dataclass(frozen=True)
class Limits:
    """What a request may ask for.

    prompt_tokens: to read.
    max_tokens: to generate, for each sequence.
    num_sequences: prompts times n.
    body_bytes: of a request.
    """

    prompt_tokens: int = 65536
    max_tokens: int = 4096
    num_sequences: int = 64
    body_bytes: int = 2**24


@dataclass(frozen=True)
class Prompt:
    """Tokens to read, and where they belong.

    text: as it is shown in a list of turns.
    token_ids: the whole text, or what comes after `before`.
    before: the turn that is continued.
    messages: of the whole conversation, if it is one.
    """

    text: str
    token_ids: list[int]
    before: Turn | None = None
    messages: list[dict[str, str]] | None = None


@dataclass(frozen=True)
class Ask:
    """A request for text, in the terms of the model.

    settings: of the n sequences that continue each prompt.
    max_tokens: for each; None takes `default_tokens` or what the model has room for.
    session: that the turn is added to.
    store: keep the turns.
    is_streamed: text is wanted as it comes.
    """

    kind: str
    owner: str
    prompts: list[Prompt]
    settings: list[GenerationSettings]
    max_tokens: int | None
    default_tokens: int
    num_logprobs: int | None = None
    prompt_logprobs: bool = False
    store: bool = True
    session: Session | None = None
    is_streamed: bool = False


@dataclass
class Result:
    """A sequence as far as it has come.

    tokens: as in Piece, if they were asked for.
    turn: id of its turn, None where it was not kept.
    """

    text: str = ""
    tokens: list[Any] = field(default_factory=list)
    finish_reason: str | None = None
    num_generated: int = 0
    turn: str | None = None


class Service:
    """A model, its scheduler, and the turns and sessions of its users.

    Args:
        engine, codec, owner: as `multilin.cli.export.open_engine` gives them.
        name: of the model, for clients.
        layout: of messages.
        turns, sessions: stores.
        limits: of requests.
        num_slots, queue_size: see Scheduler.

    Raises:
        InputError: a model without states.
    """

    def __init__(
        self, engine: Engine, codec: TextCodec, owner: StateOwner, name: str, layout: Layout, turns: TurnStore,
        sessions: SessionStore, limits: Limits, num_slots: int, queue_size: int,
    ) -> None:  # fmt: skip
        if not engine.keeps_states:
            raise InputError(f"run: a {engine.kind} model keeps no state; only models of this package are served")
        self.engine, self.codec, self.owner, self.name, self.layout = engine, codec, owner, name, layout
        self.turns, self.sessions, self.limits, self.created = turns, sessions, limits, int(time.time())
        self.busy: dict[str, Generation] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self.scheduler = Scheduler(engine, codec, self._notify, num_slots, queue_size)
        self.metrics = Metrics(self.scheduler, turns)

    def _notify(self, calls: list[Callable[[], None]]) -> None:
        """Make the scheduler's calls on the event loop, all of a step at once."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_call_all, calls)

    def text(self, token_ids: list[int], param: str) -> str:
        """The text of tokens, without those that are no text.

        Raises:
            InputError: a token that there is not, in the field `param`.
        """
        wrong = next((token for token in token_ids if not 0 <= token < self.engine.vocab_size), None)
        if wrong is not None:
            last = self.engine.vocab_size - 1
            raise InputError(f"{param}: {shown(wrong)} given, but a token is a number from 0 to {last}")
        text: str = self.codec.tokenizer.decode(token_ids)
        return text

    def token_text(self, token_id: int) -> str:
        """The text of one token alone; U+FFFD in place of a part of a character."""
        text: str = self.codec.tokenizer.decode([token_id], skip_special_tokens=False)
        return text

    async def begin(self, ask: Ask, answer: "Callable[[Generation], dict[str, Any]] | None" = None) -> "Generation":
        """Check a request and queue it.

        Args:
            ask: the request.
            answer: called when a sequence has ended, for what is kept with its turn.

        Raises:
            ApiError: a session that another request continues, or a full queue.
            InputError: what is asked for is not possible.
        """
        self._loop = asyncio.get_running_loop()
        if ask.session is not None and ask.session.id in self.busy:
            raise ApiError(409, f"session: another request continues {ask.session.id}", "session", "session_busy")
        generation = Generation(self, ask, answer)
        if ask.session is not None:
            self.busy[ask.session.id] = generation
        try:
            generation.jobs = await asyncio.to_thread(self._jobs, generation)
            self.scheduler.submit(generation.jobs)
        except BaseException as error:
            generation.close()
            if isinstance(error, QueueFull):
                raise too_busy() from None
            if isinstance(error, Stopped):
                raise ApiError(503, str(error)) from None
            raise
        return generation

    def _jobs(self, generation: "Generation") -> list[Job]:
        ask = generation.ask
        for settings in ask.settings:
            check_settings(settings, self.engine.vocab_size)
        if len(ask.prompts) * len(ask.settings) > self.limits.num_sequences:
            raise InputError(
                f"n: {len(ask.prompts)} prompts times {len(ask.settings)} answers asked for, but this server gives at "
                f"most {self.limits.num_sequences}"
            )
        if ask.max_tokens is not None and ask.max_tokens > self.limits.max_tokens:
            raise InputError(f"max_tokens: {ask.max_tokens} given, but it should be at most {self.limits.max_tokens}")
        return [self._job(generation, number, prompt) for number, prompt in enumerate(ask.prompts)]

    def _job(self, generation: "Generation", number: int, prompt: Prompt) -> Job:
        ask, before, state = generation.ask, prompt.before, None
        if before is not None:
            kept = self.turns.get(ask.owner, before.id)
            if kept is None:
                raise ApiError(404, f"the turn {before.id} is no longer kept", "session", NOT_FOUND)
            known_ids = before.token_ids + prompt.token_ids
            state = kept[1]
        else:
            known_ids = prompt.token_ids
            kept = None if ask.prompt_logprobs else self.turns.longest(ask.owner, known_ids)
            if kept is not None:
                before, state = kept
        num_read, num_unknown = (0, 0) if before is None else (before.num_read, before.num_unknown)
        token_ids = known_ids[num_read - num_unknown :]
        if not token_ids:
            raise InputError("prompt: none given, and nothing is left to read; give some text to go on with")
        if len(token_ids) > self.limits.prompt_tokens:
            raise InputError(
                f"prompt: {len(token_ids)} tokens to read, but this server reads at most {self.limits.prompt_tokens}"
            )
        total, longest = num_read + len(token_ids), self.engine.longest_text
        max_tokens = ask.max_tokens
        if max_tokens is None:
            room = self.limits.max_tokens if longest is None else longest - total + 1
            max_tokens = max(min(ask.default_tokens, self.limits.max_tokens, room), 1)
        try:
            check_length(total, max_tokens, longest)
        except InputError as error:
            raise InputError(str(error).replace("max_new_tokens", "max_tokens")) from None
        generation.num_prompt_tokens += total
        generation.num_cached_tokens += num_read
        generation.parents.append((before, known_ids, num_unknown))
        first = number * len(ask.settings)
        return Job(
            ask.owner, token_ids, known_ids, None if state is None else unpack_state(state, self.owner), ask.settings,
            max_tokens, lambda index, event: generation.receive(first + index, event), ask.num_logprobs,
            ask.prompt_logprobs,
        )  # fmt: skip

    def keep(self, generation: "Generation", index: int, end: End) -> None:
        """Keep the turn at the end of a sequence."""
        ask, result, number = generation.ask, generation.results[index], index // len(generation.ask.settings)
        prompt, (before, known_ids, num_unknown) = ask.prompts[number], generation.parents[number]
        token_ids = known_ids + end.token_ids
        contents: StateContents = self.engine.save(end.state)
        contents.unread_ids = [token_ids[len(token_ids) - end.num_unread :]]
        messages = None
        if prompt.messages is not None:
            messages = [*prompt.messages, {"role": "assistant", "content": result.text}]
        turn = Turn(
            generation.turn_ids[index], ask.owner, before.id if before else None, ask.kind, prompt.text, result.text,
            messages, token_ids, num_unknown + len(token_ids) - end.num_unread, num_unknown,
            answer=None if generation.answer is None else generation.answer(generation),
        )  # fmt: skip
        self.turns.add(turn, pack_state(contents, self.owner))


class Generation:
    """The sequences of a request, seen from the event loop."""

    def __init__(
        self, service: Service, ask: Ask, answer: "Callable[[Generation], dict[str, Any]] | None" = None
    ) -> None:
        self.service, self.ask, self.answer, self.jobs = service, ask, answer, list[Job]()
        self.parents: list[tuple[Turn | None, list[int], int]] = []
        self.num_prompt_tokens = self.num_cached_tokens = 0
        self.results = [Result() for _ in range(len(ask.prompts) * len(ask.settings))]
        self.turn_ids = [new_id("turn") for _ in self.results]
        self.changed, self._next_time = asyncio.Event(), 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.is_abandoned = False
        self._received: deque[tuple[int, Event]] = deque()
        self._begun: float | None = time.monotonic()

    @property
    def num_generated(self) -> int:
        """Tokens of all sequences that have ended."""
        return sum(result.num_generated for result in self.results)

    def receive(self, index: int, event: Event) -> None:
        """Take what happened to a sequence."""
        if self._begun is not None:
            self.service.metrics.first_token.observe(time.monotonic() - self._begun)
            self._begun = None
        self._received.append((index, event))
        if not isinstance(event, Piece):
            self.changed.set()
        elif self.ask.is_streamed and self._timer is None:
            # Text that comes close together is sent together: to send takes longer than to generate a token.
            self._timer = asyncio.get_running_loop().call_at(self._next_time, self.changed.set)

    def abandon(self) -> None:
        """The client is gone."""
        self.is_abandoned = True
        self.changed.set()

    def finish(self) -> None:
        """End the sequences where they are; their turns are kept."""
        for job in self.jobs:
            self.service.scheduler.finish(job)

    def close(self) -> None:
        """Let go of the sequences that have not ended, and of the session."""
        for job in self.jobs:
            self.service.scheduler.cancel(job)
        if self.ask.session is not None:
            self.service.busy.pop(self.ask.session.id, None)

    async def pieces(self, silence: float) -> AsyncIterator[dict[int, Piece]]:
        """What is new in each sequence, until all have ended; nothing at all every so many seconds of silence.

        Ends early when the client is gone.
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
            pause = PAUSE + PAUSE_EACH * self.service.scheduler.counts.running
            self._next_time = asyncio.get_running_loop().time() + pause
            if self.is_abandoned:
                return
            new: dict[int, Piece] = {}
            ended: list[tuple[int, End]] = []
            while self._received:
                index, event = self._received.popleft()
                if isinstance(event, Exception):
                    raise event
                if isinstance(event, End):
                    ended.append((index, event))
                    continue
                text, tokens = new.get(index, ("", []))
                new[index] = Piece(text + event.text, [*tokens, *event.tokens])
                self.results[index].text += event.text
                self.results[index].tokens += event.tokens
            for index, end in ended:
                new.setdefault(index, Piece("", []))
                await self._end(index, end)
            yield new
        self.service.metrics.add_request(self.num_prompt_tokens, self.num_cached_tokens, self.num_generated)

    async def _end(self, index: int, end: End) -> None:
        """Keep the turn, before the client learns of the end."""
        result, ask = self.results[index], self.ask
        result.num_generated, result.finish_reason = end.num_generated, end.finish_reason
        if not ask.store:
            return
        await asyncio.to_thread(self.service.keep, self, index, end)
        result.turn = self.turn_ids[index]
        if ask.session is not None and not self.is_abandoned:
            ask.session.turns.append(result.turn)
            await asyncio.to_thread(self.service.sessions.save, ask.session)


def _call_all(calls: list[Callable[[], None]]) -> None:
    for call in calls:
        call()
