"""Runs the application with uvicorn."""

import asyncio
import contextlib
import socket

import uvicorn
from starlette.types import ASGIApp

from multilin.serving.service import Service

END_SECONDS = 10.0  # for requests to end when the server is stopped
MOST_CONNECTIONS = 4096


def run_server(app: ASGIApp, service: Service, listener: socket.socket) -> None:
    """Answer requests until SIGINT or SIGTERM comes; requests then have some seconds to end."""
    with contextlib.suppress(KeyboardInterrupt):  # which uvicorn passes on when it has ended
        asyncio.run(_Server(_config(app), service).serve(sockets=[listener]))


def _config(app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, limit_concurrency=MOST_CONNECTIONS,
        timeout_graceful_shutdown=int(END_SECONDS) + 5, lifespan="off",
    )  # fmt: skip


class _Server(uvicorn.Server):
    """Ends the scheduler before the connections, so that every stream is told its end."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, and let requests end."""
        ended = asyncio.create_task(asyncio.to_thread(self._service.scheduler.stop, END_SECONDS))
        await super().shutdown(sockets)
        await ended
