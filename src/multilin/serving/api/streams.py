"""Answers over HTTP: whole or as server-sent events, given up when the client is gone."""

import asyncio
import contextlib
import json
import logging
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from multilin.errors import InputError
from multilin.serving.api.answers import Form
from multilin.serving.errors import ApiError, from_input_error
from multilin.serving.generation import Generation
from multilin.serving.jobs import Stopped

SILENCE = 10.0  # seconds after which a comment keeps a stream open
log = logging.getLogger("multilin.serve")


def to_json(value: Any) -> bytes:
    """JSON in UTF-8; halves of characters, which UTF-8 does not have, are escaped."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":")).encode()


class JsonResponse(Response):
    """A Response of plain data."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """As JSON."""
        return to_json(content)


def error_response(error: ApiError) -> Response:
    """A refusal."""
    return JsonResponse(error.body, error.status, dict(error.headers or {}))


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of an exception."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InputError):
        return from_input_error(error)
    if isinstance(error, Stopped):
        return ApiError(503, str(error))
    log.error("a request failed", exc_info=error)
    return ApiError(500, "the server failed; its log says why")


class Answer(Response):
    """The answer to a request that generates.

    Args:
        generation: under way.
        form: of the answer.
    """

    def __init__(self, generation: Generation, form: Form) -> None:
        super().__init__()
        self.generation, self.form = generation, form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, and watch meanwhile whether the client is there."""
        watcher = asyncio.create_task(self._watch(receive))
        try:
            await (self._stream(send) if self.generation.ask.is_streamed else self._whole(scope, receive, send))
        finally:
            self.generation.close()
            watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watcher

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.generation.abandon()

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async for _ in self.generation.pieces(SILENCE):
                pass
            response: Response | None = (
                None if self.generation.is_abandoned else JsonResponse(self.form.whole(self.generation))
            )
        except Exception as error:
            response = error_response(as_api_error(error))
        if response is not None:
            await response(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache",
                   "x-accel-buffering": "no"}  # fmt: skip
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        body = b"".join(map(self._event, self.form.opening(self.generation)))
        try:
            if body:
                await self._send(send, body)
            async for new in self.generation.pieces(SILENCE):
                events = [
                    self._event(event)
                    for index, piece in new.items()
                    for event in self.form.pieces(index, piece, self.generation.results[index])
                ]
                if events or not new:
                    await self._send(send, b"".join(events) or b": keep-alive\n\n")
            body = b"".join(map(self._event, self.form.closing(self.generation)))
        except Exception as error:
            body = self._event(as_api_error(error).body)
        if not self.generation.is_abandoned:
            await send({"type": "http.response.body", "body": body + b"data: [DONE]\n\n", "more_body": False})

    async def _send(self, send: Send, body: bytes) -> None:
        await send({"type": "http.response.body", "body": body, "more_body": True})

    def _event(self, event: dict[str, Any]) -> bytes:
        name = f"event: {event['type']}\n".encode() if "type" in event else b""
        return name + b"data: " + to_json(event) + b"\n\n"
