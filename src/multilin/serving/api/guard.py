"""What every request passes first: keys, limits and counts. Pure ASGI, so that a client's leaving is seen behind it."""

import asyncio
import hashlib
import hmac
import logging
from collections.abc import Sequence

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from multilin.serving.api import page
from multilin.serving.api.streams import as_api_error, error_response
from multilin.serving.errors import ApiError
from multilin.serving.service import Service

NOBODY = "0" * 16  # owner of all turns where there are no keys
BODY_SECONDS = 30.0  # for a body to arrive
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
OPEN_PATHS = ("/health", *page.PATHS)
log = logging.getLogger("multilin.serve")


class Guard:
    """Checks the key and the size of a request, counts its answer, and turns every failure into JSON.

    Args:
        app: to call.
        service: for its limits and metrics.
        keys: of which a request must have one; none lets everybody in.
        is_loopback: the server is for this machine; requests under another name, as a page elsewhere could make with a
            name of its own for this address, are refused.
    """

    def __init__(self, app: ASGIApp, service: Service, keys: Sequence[str], *, is_loopback: bool) -> None:
        self.app, self.service, self.is_loopback = app, service, is_loopback
        self._keys = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        is_begun = False

        async def counted(message: Message) -> None:
            nonlocal is_begun
            if message["type"] == "http.response.start":
                is_begun = True
                path = getattr(scope.get("route"), "path", "other")
                self.service.metrics.answers.labels(path, str(message["status"])).inc()
            await send(message)

        try:
            connection = HTTPConnection(scope)
            scope["owner"] = self._owner(connection)
            await self.app(scope, self._limited(connection, receive), counted)
        except Exception as error:
            if not is_begun:
                await error_response(as_api_error(error))(scope, receive, counted)

    def _owner(self, connection: HTTPConnection) -> str:
        host = connection.headers.get("host", "").rpartition(":")
        name = host[0] if host[1] and host[2].isdigit() else connection.headers.get("host", "")
        if self.is_loopback and name not in LOOPBACK:
            raise ApiError(400, f"host: {name!r:.80} given, but this server is for this machine only", "host")
        if not self._keys:
            return NOBODY
        given = connection.headers.get("authorization", "").removeprefix("Bearer ")
        digest = hashlib.sha256(given.encode()).digest()
        # Every key is looked at, so that the time says nothing.
        if not sum(hmac.compare_digest(digest, key) for key in self._keys):
            if connection.scope["path"] in OPEN_PATHS:
                return NOBODY
            raise ApiError(
                401, "api key: missing or wrong; send the header `Authorization: Bearer KEY`", None, "invalid_api_key",
                {"WWW-Authenticate": "Bearer"},
            )  # fmt: skip
        return hashlib.sha256(b"owner" + digest).hexdigest()[:16]

    def _limited(self, connection: HTTPConnection, receive: Receive) -> Receive:
        """The body, which may not be too large or too slow."""
        most, deadline = self.service.limits.body_bytes, asyncio.get_running_loop().time() + BODY_SECONDS
        announced = connection.headers.get("content-length", "0")
        if announced.isdigit() and int(announced) > most:
            raise _too_large(most)
        num_bytes, is_complete = 0, False

        async def limited() -> Message:
            nonlocal num_bytes, is_complete
            if is_complete:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise ApiError(408, f"body: not complete after {BODY_SECONDS:g} seconds") from None
            num_bytes += len(message.get("body", b""))
            is_complete = not message.get("more_body", False)
            if num_bytes > most:
                raise _too_large(most)
            return message

        return limited


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"body: too large; this server takes at most {most} bytes", None, "body_too_large")
