"""Errors that the server returns, in the form of OpenAI's API."""

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from multilin.errors import InputError, shorten, shown

log = logging.getLogger("multilin.serve")


class ApiError(Exception):
    """A request that is refused.

    Args:
        status: the HTTP status.
        message: one sentence.
        param: the field that is wrong; None if the error is not about a field.
        code: the kind of error in one word, for programs.
        headers: headers of the answer.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers

    @property
    def body(self) -> dict[str, Any]:
        """The body of the answer."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def as_api_error(error: Exception) -> ApiError:
    """Convert an exception to an ApiError. The text before the colon of an InputError becomes `param`."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InputError):
        match = re.match(r"([a-z_]+)[.:]", str(error))
        return ApiError(400, str(error), match[1] if match else None, "invalid_value")
    log.error("a request failed", exc_info=error)
    return ApiError(500, "the server failed; its log says why")


def from_validation(errors: Sequence[Any]) -> ApiError:
    """Convert the errors that pydantic found in a body to one ApiError."""
    # If a field allows several types, an error deep inside a value of one type says more than `not of another type`.
    first = next((error for error in errors if error["type"] == "extra_forbidden"), None)
    first = first or max(errors, key=lambda error: len(_fields(error["loc"])))
    path = [str(part) for part in first["loc"] if part not in ("body", "query")]
    param = shorten(path[0]) if path else None
    kind, message = first["type"], str(first["msg"])
    if kind == "extra_forbidden":
        return ApiError(400, f"{shorten(path[-1])}: unknown or unsupported field", shorten(path[-1]), "unknown_field")
    field = _fields(first["loc"])
    place = shorten("".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in field)[1:]) or "body"
    if kind == "missing":
        return ApiError(400, f"{place}: missing; a value is required", param, "missing_field")
    if kind == "json_invalid" or not path:
        is_unread = isinstance(first.get("input"), bytes)
        hint = "; the header Content-Type should be application/json" if is_unread else ""
        return ApiError(400, f"body: not a JSON object ({message[:100]}){hint}", None, "invalid_json")
    # A field that allows several types has an error for each of them.
    same = [error for error in errors if _fields(error["loc"])[: len(field)] == field]
    words = list(dict.fromkeys(_accepted(str(error["msg"])) for error in same))
    repeated = "be " if words[0].startswith("be ") else ""
    accepted = " or ".join([words[0], *(word.removeprefix(repeated) for word in words[1:])])
    given = "null" if first["input"] is None else shown(first["input"])
    return ApiError(400, f"{place}: {given} given, but it should {accepted}", param, "invalid_value")


def _fields(location: Sequence[str | int]) -> tuple[str | int, ...]:
    """The path of a field in a body, without the type names and list entries that pydantic adds to the path."""
    named = [
        number for number, part in enumerate(location)
        if isinstance(part, str) and re.fullmatch("[a-z_]+", part) and part not in ("str", "int")
    ]  # fmt: skip
    parts = location[: named[-1] + 1] if named else location
    return tuple(part for number, part in enumerate(parts) if isinstance(part, int) or number in named)[1:]


def _accepted(message: str) -> str:
    """The part after `should` of pydantic's message, such as `be a valid string`."""
    words = re.sub(r"^[A-Z][a-z]+ should ", "", message)
    return re.sub(r" after validation, not \d+$| or (an )?instance of \w+$", "", words)


def too_busy() -> ApiError:
    """The answer while the queue is full."""
    return ApiError(
        429, "the server is busy and its queue is full; try again", None, "queue_full", {"Retry-After": "1"}
    )


def still_loading() -> ApiError:
    """The answer before the model is loaded."""
    return ApiError(503, "the model is still being loaded; try again", None, "loading", {"Retry-After": "1"})


def shutting_down() -> ApiError:
    """The answer while the server is shutting down."""
    return ApiError(503, "the server is shutting down")


NOT_FOUND = "not_found"
