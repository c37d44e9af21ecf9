"""A conversation with a model in this process: the service of a server, without HTTP."""

import asyncio
import dataclasses
from collections.abc import Callable

from multilin.errors import InputError
from multilin.inference.settings import DEFAULT_NEW_TOKENS, GenerationSettings
from multilin.serving.errors import ApiError
from multilin.serving.generation import Ask, Generation
from multilin.serving.service import Service
from multilin.serving.sessions import Session
from multilin.serving.turns import NOBODY, Turn

SILENCE = 3600.0  # seconds; there is no connection to keep open


class LocalChat:
    """A branch of a conversation, with the methods of `RemoteChat`.

    Args:
        service: the model.
        settings: how answers are generated.
        session: the turns so far.
    """

    def __init__(self, service: Service, settings: GenerationSettings, session: Session) -> None:
        self._service, self._settings, self._session = service, settings, session
        self._generation: Generation | None = None

    @classmethod
    def begin(cls, service: Service, settings: GenerationSettings, state: bytes | None = None) -> "LocalChat":
        """A new conversation, or one that goes on from the content of a state file.

        Raises:
            InputError: the state cannot be used.
        """
        turns = [] if state is None else [service.import_state(NOBODY, state).id]
        return cls(service, settings, service.sessions.create(NOBODY, turns))

    def answer(self, messages: list[dict[str, str]], write: Callable[[str], object]) -> None:
        """Add messages, and call `write` with each piece of the answer.

        Raises:
            InputError: the text becomes longer than the model can read, or see `_last_turn`.
        """
        try:
            asyncio.run(self._answer(messages, write))
        except ApiError as error:
            raise InputError(error.message) from None

    async def _answer(self, messages: list[dict[str, str]], write: Callable[[str], object]) -> None:
        service, last = self._service, self._last_turn()
        before = None if last is None else last[0]
        settings = dataclasses.replace(self._settings, stop=(*self._settings.stop, *service.layout.stops))
        ask = Ask(
            "chat", NOBODY, [service.chat_prompt(messages, before)], [settings], None,
            settings.max_new_tokens or DEFAULT_NEW_TOKENS, session=self._session, is_streamed=True,
        )  # fmt: skip
        self._generation = await service.begin(ask)
        try:
            async for new in self._generation.pieces(SILENCE):
                for piece in new.values():
                    write(piece.text)
        finally:
            self._generation.close()
            self._generation = None

    def stop(self) -> None:
        """End the answer that is being generated; a signal handler may call it."""
        if self._generation is not None:
            self._generation.finish()

    def fork(self) -> "LocalChat":
        """Another branch that begins as a copy of this one."""
        session = self._service.sessions.create(NOBODY, list(self._session.turns))
        return LocalChat(self._service, self._settings, session)

    def rewind(self, num_turns: int) -> None:
        """Drop the last answers and their messages.

        Raises:
            InputError: there are fewer.
        """
        if num_turns > len(self._session.turns):
            raise InputError(f"turns: {num_turns} given, but the session has {len(self._session.turns)}")
        self._session.turns = self._session.turns[:-num_turns]
        self._service.sessions.save(self._session)

    def state(self) -> bytes:
        """The content of a state file.

        Raises:
            InputError: there is no answer yet, or see `_last_turn`.
        """
        last = self._last_turn()
        if last is None:
            raise InputError("turn: the session has no turn yet")
        return last[1]

    def _last_turn(self) -> tuple[Turn, bytes] | None:
        """The last turn and its state; None if there is no answer yet.

        Raises:
            InputError: many other answers came after it, so that it is no longer in memory.
        """
        turns = self._session.turns
        kept = self._service.turns.get(NOBODY, turns[-1]) if turns else None
        if turns and kept is None:
            raise InputError("turn: the last answer of this branch is no longer in memory; go on in another branch")
        return kept
