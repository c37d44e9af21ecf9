"""The application that a web server runs."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp

import multilin
from multilin.errors import InputError
from multilin.serving.api import page, routes, sessions
from multilin.serving.api.guard import Guard
from multilin.serving.api.streams import as_api_error, error_response
from multilin.serving.errors import ApiError, from_validation
from multilin.serving.readings import Readings
from multilin.serving.service import Service

if TYPE_CHECKING:
    from multilin.inference.runs import Run


def create_app(
    service: Service, *, keys: Sequence[str] = (), origins: Sequence[str] = (), is_loopback: bool = False,
    load_run: "Callable[[], Run] | None" = None,
) -> ASGIApp:  # fmt: skip
    """The application.

    Args:
        service: what it serves.
        keys: of which a request must have one; none lets everybody in.
        origins: of pages elsewhere that may call it.
        is_loopback: answer only requests that name this machine.
        load_run: gives the PyTorch model, to show what it read; None where there is none, as in an export.
    """
    app = FastAPI(title="multilin", version=multilin.__version__, docs_url=None, redoc_url=None)
    app.state.service, app.state.readings = service, Readings(load_run)
    app.include_router(routes.router)
    app.include_router(sessions.router)
    app.include_router(page.router)
    app.add_exception_handler(RequestValidationError, _refuse)
    app.add_exception_handler(HTTPException, _refuse)
    app.add_exception_handler(ApiError, _refuse)
    app.add_exception_handler(InputError, _refuse)
    app.add_exception_handler(Exception, _refuse)
    guarded: ASGIApp = Guard(app, service, keys, is_loopback=is_loopback)
    if origins:
        guarded = CORSMiddleware(guarded, allow_origins=list(origins), allow_methods=["*"], allow_headers=["*"])
    return guarded


async def _refuse(request: Request, error: Exception) -> Response:
    if isinstance(error, RequestValidationError):
        return error_response(from_validation(error.errors()))
    if isinstance(error, HTTPException):
        words = {404: f"no endpoint {request.method} {request.url.path!r:.80}", 405: f"{request.method} is not allowed"}
        return error_response(ApiError(error.status_code, words.get(error.status_code, f"body: {error.detail}")))
    if isinstance(error, ClientDisconnect):
        return Response()
    return error_response(as_api_error(error))
