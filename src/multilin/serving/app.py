"""The application with all endpoints, and the uvicorn server that runs it."""

import asyncio
import contextlib
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

import multilin
from multilin.errors import InputError
from multilin.serving.api import page, routes, sessions
from multilin.serving.api.guard import Guard
from multilin.serving.api.streams import error_response
from multilin.serving.errors import ApiError, as_api_error, from_validation, still_loading
from multilin.serving.readings import Readings
from multilin.serving.service import Service

if TYPE_CHECKING:
    from multilin.runs.load import Run

END_SECONDS = 10.0  # in which requests may end when the server is stopped
# While the model is loaded, a request waits this long and is then refused. Many clients give up after a minute.
HELD_SECONDS, HELD_HEALTH_SECONDS = 50.0, 1.5
MOST_CONNECTIONS = 4096


def create_app(
    service: Service, *, keys: Sequence[str] = (), origins: Sequence[str] = (), is_loopback: bool = False,
    load_run: "Callable[[], Run] | None" = None, body_bytes: int = 2**24,
) -> ASGIApp:  # fmt: skip
    """Create the ASGI application of the server.

    Args:
        service: the model with its turns and sessions.
        keys: valid API keys; every request must have one of them. If the list is empty, no key is needed.
        origins: origins of other web pages that may call the server.
        is_loopback: answer only requests whose Host header names this machine, from the server's page or `origins`.
        load_run: loads the PyTorch model, which computes the weights of `/reading`; None for an export.
        body_bytes: the largest body of a request.
    """
    app = FastAPI(title="multilin", version=multilin.__version__, docs_url=None, redoc_url=None)
    app.state.service, app.state.readings = service, Readings(load_run)
    for router in (routes.router, sessions.router, page.router):
        app.include_router(router)
    for kind in (RequestValidationError, HTTPException, ApiError, InputError, Exception):
        app.add_exception_handler(kind, _refuse)
    guarded: ASGIApp = Guard(app, service.metrics, keys, origins, body_bytes, is_loopback=is_loopback)
    if origins:
        guarded = CORSMiddleware(guarded, allow_origins=list(origins), allow_methods=["*"], allow_headers=["*"])
    return guarded


async def _refuse(request: Request, error: Exception) -> Response:
    if isinstance(error, RequestValidationError):
        return error_response(from_validation(error.errors()))
    if isinstance(error.__cause__, ApiError):  # raised by the guard while the body was read
        error = error.__cause__
    if isinstance(error, HTTPException):
        words = {404: f"no endpoint {request.method} {request.url.path!r:.80}", 405: f"{request.method} is not allowed"}
        reason = words.get(error.status_code, f"body: {error.detail}")
        return error_response(ApiError(error.status_code, reason, headers=error.headers))
    if isinstance(error, ClientDisconnect):
        return Response()
    return error_response(as_api_error(error))


class Server(uvicorn.Server):
    """An HTTP server in a thread, which listens at once, but answers requests only after `open` was called.

    Before `open`, a request waits at most `HELD_SECONDS` (`/health`: `HELD_HEALTH_SECONDS`), then gets status 503.

    Args:
        listener: the socket to listen on.
    """

    def __init__(self, listener: socket.socket) -> None:
        super().__init__(
            uvicorn.Config(
                self._answer, interface="asgi3", log_level="warning", access_log=False, server_header=False,
                limit_concurrency=MOST_CONNECTIONS, timeout_graceful_shutdown=int(END_SECONDS) + 5, lifespan="off",
            )
        )  # fmt: skip
        self._app: ASGIApp | None = None
        self._stop: Callable[[float], object] = float  # a function without effect
        self._listener = listener
        self._ended = threading.Event()  # join would count the thread as ended after a signal

    def __enter__(self) -> "Server":
        threading.Thread(target=self._serve_and_end, name="multilin-http", daemon=True).start()
        return self

    def _serve_and_end(self) -> None:
        try:
            self.run([self._listener])
        finally:
            self._ended.set()

    def __exit__(self, *_: object) -> None:
        """Wait until requests end, for at most `END_SECONDS`."""
        self.should_exit = True
        self._ended.wait()

    def open(self, app: ASGIApp, service: Service) -> None:
        """Answer requests from now on."""
        self._app, self._stop = app, service.scheduler.stop

    def wait(self) -> None:
        """Wait until SIGINT arrives, or another signal whose handler raises an exception."""
        signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore SIGINT for commands with &
        with contextlib.suppress(KeyboardInterrupt):
            self._ended.wait()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        end = time.monotonic() + (HELD_HEALTH_SECONDS if scope["path"] == "/health" else HELD_SECONDS)
        while self._app is None and not self.should_exit and time.monotonic() < end:
            await asyncio.sleep(0.05)
        await (self._app or error_response(still_loading()))(scope, receive, send)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening and let requests end. The scheduler ends before connections close, so that streams can end."""
        ended = asyncio.create_task(asyncio.to_thread(self._stop, END_SECONDS))
        await super().shutdown(sockets)
        await ended
