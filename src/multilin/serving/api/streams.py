"""Answers over HTTP, whole or as server-sent events. Generation ends when the client disconnects."""

import asyncio
import contextlib
from collections.abc import Iterable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from multilin.serving.api.answers import Form
from multilin.serving.errors import ApiError, as_api_error
from multilin.serving.generation import Generation
from multilin.settings import inputs

SILENCE = 10.0  # seconds without text after which a comment is sent, to keep the stream open
LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}  # str.splitlines splits here


def to_json(value: Any) -> bytes:
    """Encode data as JSON in UTF-8. Escape line ends, and lone surrogates, which UTF-8 cannot encode."""
    try:
        return inputs.to_json(value, ensure_ascii=False, separators=(",", ":")).translate(LINE_ENDS).encode()
    except UnicodeEncodeError:
        return inputs.to_json(value, separators=(",", ":")).encode()


class JsonResponse(Response):
    """A response of plain data."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The body of the response: the data as JSON."""
        return to_json(content)


def error_response(error: ApiError) -> Response:
    """The response to a refused request."""
    return JsonResponse(error.body, error.status, dict(error.headers or {}))


class Answer(Response):
    """The HTTP response to a request that generates text.

    Args:
        generation: the sequences of the request.
        form: makes the JSON of the answer.
    """

    def __init__(self, generation: Generation, form: Form) -> None:
        super().__init__()
        self.generation, self.form = generation, form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer; if the client disconnects before it is sent, end the generation."""
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
        async for _ in self.generation.pieces(SILENCE):
            pass
        if not self.generation.is_abandoned:
            await JsonResponse(self.form.whole(self.generation))(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"),
                   (b"x-accel-buffering", b"no")]  # fmt: skip
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        generation, form = self.generation, self.form
        try:
            if body := _events(form.opening(generation)):
                await send({"type": "http.response.body", "body": body, "more_body": True})
            async for new in generation.pieces(SILENCE):
                body = b"".join(
                    _events(form.pieces(index, piece, generation.results[index])) for index, piece in new.items()
                )
                if body or not new:
                    await send({"type": "http.response.body", "body": body or b": keep-alive\n\n", "more_body": True})
            body = _events(form.closing(generation))
        except Exception as error:
            body = _events([as_api_error(error).body])
        if not generation.is_abandoned:
            await send({"type": "http.response.body", "body": body + b"data: [DONE]\n\n", "more_body": False})


def _events(values: Iterable[dict[str, Any]]) -> bytes:
    """Yield the answer as server-sent events."""
    return b"".join(b"data: " + to_json(value) + b"\n\n" for value in values)
