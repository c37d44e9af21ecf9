"""The ASGI middleware that checks the key and size of every request and counts the answers."""

import asyncio
import hashlib
import hmac
import re
from collections.abc import Sequence

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from multilin.serving.api import page
from multilin.serving.api.streams import error_response
from multilin.serving.errors import ApiError, as_api_error
from multilin.serving.metrics import Metrics
from multilin.serving.sessions import NOBODY

BODY_SECONDS = 30.0  # in which a body must arrive
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
OPEN_PATHS = ("/health", *page.PATHS)


class Guard:
    """Checks the key and the size of a request, counts its answer, and turns every failure into JSON.

    Args:
        app: the application that gets the accepted requests.
        metrics: counts the answers.
        keys: valid API keys; every request must have one of them. If the list is empty, no key is needed.
        origins: origins of other web pages that may make requests; `*` allows all.
        body_bytes: largest size of a body in bytes.
        is_loopback: refuse requests whose Host header does not name this machine, and requests of other pages. A
            website could make a browser on this machine send such requests (with another Host header if the website's
            domain resolves to this address).
    """

    def __init__(
        self, app: ASGIApp, metrics: Metrics, keys: Sequence[str], origins: Sequence[str], body_bytes: int,
        *, is_loopback: bool,
    ) -> None:  # fmt: skip
        self.app, self.metrics, self.origins, self.is_loopback = app, metrics, origins, is_loopback
        self.body_bytes = body_bytes
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
                self.metrics.answers.labels(path, str(message["status"])).inc()
            await send(message)

        try:
            connection = HTTPConnection(scope)
            scope["owner"] = self._owner(connection)
            await self.app(scope, self._limited(connection, receive), counted)
        except Exception as error:
            if not is_begun:
                await error_response(as_api_error(error))(scope, receive, counted)

    def _owner(self, connection: HTTPConnection) -> str:
        name = re.sub(r":\d+$", "", connection.headers.get("host", ""))
        if self.is_loopback and name not in LOOPBACK:
            raise ApiError(400, f"host: {name!r:.80} given, but this server answers only to {LOOPBACK[0]}", "host")
        origin = connection.headers.get("origin")
        is_foreign = origin is not None and origin.partition("://")[2] != connection.headers.get("host")
        if self.is_loopback and is_foreign and not {origin, "*"} & set(self.origins):
            raise ApiError(403, f"origin: {origin!r:.80} given, but --cors does not name this origin", "origin")
        if not self._keys:
            return NOBODY
        given = re.sub(r"(?i)^bearer +", "", connection.headers.get("authorization", ""))
        digest = hashlib.sha256(given.encode("latin-1")).digest()  # the bytes of the header
        # Compare with every key, so that the time does not depend on which key is right.
        if not sum(hmac.compare_digest(digest, key) for key in self._keys):
            if connection.scope["path"] in OPEN_PATHS:
                return NOBODY
            raise ApiError(
                401, "api key: missing or wrong; send the header `Authorization: Bearer KEY`", None, "invalid_api_key",
                {"WWW-Authenticate": "Bearer"},
            )  # fmt: skip
        return hashlib.sha256(b"owner" + digest).hexdigest()[:16]

    def _limited(self, connection: HTTPConnection, receive: Receive) -> Receive:
        """Return `receive` with limits on the body's size and on the time until it has arrived."""
        deadline = asyncio.get_running_loop().time() + BODY_SECONDS
        too_large = ApiError(
            413, f"body: too large; this server takes at most {self.body_bytes} bytes", None, "body_too_large"
        )
        announced = connection.headers.get("content-length", "0")
        if announced.isdigit() and int(announced) > self.body_bytes:
            raise too_large
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
            if num_bytes > self.body_bytes:
                raise too_large
            return message

        return limited
