"""The server without HTTP: prompts, generation, turns and sessions."""

import asyncio
import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from multilin.errors import InputError, plural, shown
from multilin.inference.engine import Engine
from multilin.inference.generate import check_settings, count_new_tokens
from multilin.inference.state_file import pack_state, unpack_state
from multilin.inference.text import TextCodec
from multilin.serving.errors import NOT_FOUND, ApiError
from multilin.serving.folder import Folder, new_id
from multilin.serving.generation import Ask, Generation, Prompt
from multilin.serving.jobs import End, Job
from multilin.serving.layout import Messages, open_layout
from multilin.serving.metrics import Metrics
from multilin.serving.scheduler import Scheduler
from multilin.serving.sessions import Session, SessionStore
from multilin.serving.settings import ServeLimits, num_bytes
from multilin.serving.turns import Turn, TurnStore

log = logging.getLogger("multilin.serve")


class Service:
    """A served model: its running scheduler, and the turns and sessions of its users.

    Args:
        engine, codec: the model, see `multilin.cli.export.open_engine`.
        folder: the run or the export.
        name: name of the model for clients; None takes the folder's name.
        limits: limits of requests and of the stored states.

    Raises:
        InputError: a model that keeps no states, or a store that cannot be opened.
    """

    def __init__(self, engine: Engine, codec: TextCodec, folder: Path, name: str | None, limits: ServeLimits) -> None:
        self.engine, self.codec, self.owner, self.limits = engine, codec, engine.owner, limits
        self.name, self.layout = name or folder.resolve().name, open_layout(codec, folder)
        store = None if limits.sessions is None else Folder(f"{limits.sessions}/{self.owner.hash[:16]}")
        seconds = None if limits.keep_days is None else limits.keep_days * 86400
        self.turns = TurnStore(store, num_bytes(limits.memory), num_bytes(limits.disk), seconds)
        self.sessions, self.created = SessionStore(store), int(time.time())
        self.busy: dict[str, Generation | None] = {}
        self._claiming = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.scheduler = Scheduler(engine, codec, self._notify, limits.slots, limits.queue)
        self.metrics = Metrics(self.scheduler, self.turns)

    def _notify(self, calls: list[Callable[[], None]]) -> None:
        """Run the scheduler's functions in the event loop; all functions of one step run together."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop may be closed
                self._loop.call_soon_threadsafe(lambda: [call() for call in calls])

    def text(self, token_ids: list[int], param: str) -> str:
        """The text of tokens, without special tokens.

        Raises:
            InputError: a token is not in the vocabulary; the message names the field `param`.
        """
        wrong = next((token for token in token_ids if not 0 <= token < self.engine.vocab_size), None)
        if wrong is not None:
            last = self.engine.vocab_size - 1
            raise InputError(f"{param}: {shown(wrong)} given, but a token is a number from 0 to {last}")
        return self.codec.tokenizer.decode(token_ids)

    def token_text(self, token_id: int) -> str:
        """The text of one token; for a part of a character, its bytes, such as `bytes:\\xe6`."""
        content = self.codec.token_bytes(token_id)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)

    @contextlib.contextmanager
    def changing(self, session: Session) -> Iterator[None]:
        """Claim a session, so that no other request continues or changes the session. Raises the errors of `begin`."""
        self._claim(session.id, None)
        try:
            self._check_session(session)
            yield
        finally:
            del self.busy[session.id]

    def _claim(self, session_id: str, generation: Generation | None) -> None:
        """Reserve a session for this request; fails if another request continues or changes the session."""
        with self._claiming:
            if session_id in self.busy:
                raise ApiError(409, f"session: another request continues {session_id}", "session", "session_busy")
            self.busy[session_id] = generation

    async def begin(self, ask: Ask) -> Generation:
        """Check a request and queue it.

        Raises:
            ApiError: another request continues or changes the session, the queue is full, or the server ends.
            InputError: a wrong value in the request.
        """
        self._loop = asyncio.get_running_loop()
        session_id = "" if ask.session is None else ask.session.id
        on_close = functools.partial(self.busy.pop, session_id, None)
        generation = Generation(ask, self.scheduler, self.metrics, self._keep, on_close)
        if session_id:
            self._claim(session_id, generation)
        try:
            if ask.session is not None:
                await asyncio.to_thread(self._check_session, ask.session)
            generation.jobs = await asyncio.to_thread(self._jobs, generation)
            self.scheduler.submit(generation.jobs)
            if generation.is_finished:
                generation.finish()
        except BaseException:
            generation.close()
            raise
        return generation

    def _check_session(self, session: Session) -> None:
        """Refuse a session that another request changed or deleted since this request looked it up."""
        now = self.sessions.get(session.owner, session.id)
        if now is None or now.turns != session.turns:
            raise ApiError(409, f"session: another request has changed {session.id}", "session", "session_busy")

    def _jobs(self, generation: Generation) -> list[Job]:
        ask, limits = generation.ask, self.limits
        for settings in ask.settings:
            check_settings(settings, self.engine.vocab_size)
        if len(ask.prompts) * len(ask.settings) > limits.slots:
            raise InputError(
                f"n: {plural(len(ask.prompts), 'prompt')} times {len(ask.settings)} answers asked for, "
                f"but this server gives at most {limits.slots} at a time"
            )
        if ask.max_tokens is not None and ask.max_tokens > limits.max_tokens:
            raise InputError(f"{ask.limit_name}: {ask.max_tokens} given, but it should be at most {limits.max_tokens}")
        return [self._job(generation, number, prompt) for number, prompt in enumerate(ask.prompts)]

    def _job(self, generation: Generation, number: int, prompt: Prompt) -> Job:
        ask, limits, parent = generation.ask, self.limits, prompt.before
        known_ids = [*(parent.token_ids if parent else ()), *prompt.token_ids]
        if parent is not None and (parent.num_unknown or parent.unread_ids or prompt.token_ids):
            kept = self.turns.get(ask.owner, parent.id)
            if kept is None:
                raise ApiError(404, f"session: the turn {parent.id} is no longer kept", "session", NOT_FOUND)
        else:  # a new text, or a read one whose last token is read again
            kept = None if ask.prompt_logprobs else self.turns.longest(ask.owner, known_ids)
        before, state = kept or (None, None)
        num_read = before.num_read if before else 0
        token_ids = known_ids[num_read - (before.num_unknown if before else 0) :]
        if not token_ids:
            raise InputError(
                "prompt: empty, but the model has already read the whole text of the session; give some text"
            )
        if len(token_ids) > limits.max_prompt:
            raise InputError(
                f"prompt: {len(token_ids)} tokens to read, but a request may have at most {limits.max_prompt}"
            )
        total, longest = num_read + len(token_ids), self.engine.longest_text
        default = min(ask.default_tokens, limits.max_tokens)
        max_tokens = count_new_tokens(total, ask.max_tokens, longest, default=default, field=ask.limit_name)
        generation.num_prompt_tokens += total
        generation.num_cached_tokens += num_read
        generation.parents.append(parent or before)
        first = number * len(ask.settings)
        return Job(
            ask.owner, token_ids, known_ids, None if state is None else unpack_state(state, self.owner), ask.settings,
            max_tokens, lambda index, event: generation.receive(first + index, event), ask.num_logprobs,
            len(prompt.token_ids) if ask.prompt_logprobs else 0,
            self.layout.ends if prompt.messages is not None else frozenset(),
        )  # fmt: skip

    def chat_prompt(self, messages: Messages, before: Turn | None) -> Prompt:
        """Make the prompt of the next messages of a conversation, which follow the turn `before`."""
        earlier = (before.messages or []) if before is not None else []
        text = "\n\n".join(message["content"] for message in messages)
        return Prompt(text, self.layout.token_ids(messages, before), before, [*earlier, *messages])

    def import_state(self, owner: str, content: bytes) -> Turn:
        """Make a turn from the content of a state file. The text of the turn is not known.

        Raises:
            InputError: the content is not a state file of this model, or holds the states of several texts.
        """
        state = unpack_state(content, self.owner)
        num_rows, unread_ids = len(state.unread_ids), state.unread_ids[0]
        if num_rows != 1:
            raise InputError(f"state: holds {num_rows} texts, but a session has one; give a state of one text")
        num_read = int(state.tensors["embedding.num_read_B"][0])
        turn = Turn(new_id("turn"), owner, None, "import", "", "", None, unread_ids, num_read, num_read)
        state.rng_state = None
        self.turns.add(turn, pack_state(state, self.owner))
        return turn

    def _keep(self, generation: Generation, index: int, end: End) -> None:
        """Keep a sequence that has ended as a turn, and add the turn to the session.

        Raises:
            ApiError: a turn of a session cannot be written. Without a session, a failed write is no error.
        """
        if not generation.ask.store:
            return
        ask, result, number = generation.ask, generation.results[index], index // len(generation.ask.settings)
        prompt, before, session = ask.prompts[number], generation.parents[number], ask.session
        num_unknown = before.num_unknown if before else 0
        token_ids = [*generation.jobs[number].known_ids, *end.token_ids]
        contents = self.engine.save(end.state)
        contents.unread_ids = [token_ids[len(token_ids) - end.num_unread :]]
        messages = None
        if prompt.messages is not None:
            messages = [*prompt.messages, {"role": "assistant", "content": result.text}]
        turn = Turn(
            new_id("turn"), ask.owner, before.id if before else None, ask.kind, prompt.text, result.text,
            messages, token_ids, num_unknown + len(token_ids) - end.num_unread, num_unknown,
        )  # fmt: skip
        try:
            self.turns.add(turn, pack_state(contents, self.owner))
            if session is not None and not generation.is_abandoned:
                session.turns.append(turn.id)
                self.sessions.save(session)
        except OSError as error:  # such as a full disk; without a session the client still gets the text
            log.warning("a turn cannot be kept: %s", error)
            if session is not None:
                raise ApiError(507, "store: the answer cannot be kept; the server's log says why", "store") from None
            return
        result.turn = turn.id
