"""The client's side of a conversation that a server of multilin keeps as a session."""

import contextlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx

from multilin.errors import InputError, shown
from multilin.inference.generate import DEFAULTS, check_unused
from multilin.inference.settings import GenerationSettings

TIMEOUT = httpx.Timeout(60.0, connect=10.0)  # seconds; a generating server sends something at least every 10
Json = dict[str, Any]


class Conversation:
    """A branch of a conversation, which the server keeps as a session.

    Args:
        client: connection to the server, see `connect`.
        settings: how answers are generated.
        session: id of the session.
    """

    def __init__(self, client: httpx.Client, settings: GenerationSettings, session: str) -> None:
        self._client, self._settings, self.session = client, settings, session
        self._stopping: threading.Thread | None = None

    @classmethod
    def begin(
        cls, client: httpx.Client, settings: GenerationSettings, state: bytes | None = None, session: str | None = None
    ) -> "Conversation":
        """Begin with a new session, with a session from the content of a state file, or with an existing session.

        Raises:
            InputError: the server would ignore a setting, refuses the request, or does not answer.
        """
        check_unused(settings)
        if session is not None:
            if not re.fullmatch(r"[\w-]+", session):
                raise InputError(f"--session: {shown(session)} given, but names look like session_0123456789abcdef")
            identity = _call(client, "GET", f"/v1/sessions/{session}")
        elif state is None:
            identity = _call(client, "POST", "/v1/sessions", json={})
        else:
            headers = {"content-type": "application/octet-stream"}
            identity = _call(client, "POST", "/v1/sessions", content=state, headers=headers)
        return cls(client, settings, identity)

    def answer(self, messages: list[dict[str, str]], write: Callable[[str], object]) -> None:
        """Send messages, and call `write` with each piece of the answer.

        Raises:
            InputError: the server does not answer, or refuses.
        """
        body = {"messages": messages, "session": self.session, "stream": True, **_fields(self._settings)}
        try:
            with _reaching(self._client), self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                for event in _events(response):
                    if "error" in event:
                        raise InputError(f"server: {event['error']['message']}")
                    for choice in event["choices"]:
                        write(choice["delta"].get("content", ""))
        finally:
            if self._stopping is not None:
                self._stopping.join()
                self._stopping = None

    def stop(self) -> None:
        """End the present answer as soon as possible; a signal handler may call this method."""
        self._stopping = threading.Thread(target=self._stop, daemon=True)
        self._stopping.start()

    def _stop(self) -> None:
        with contextlib.suppress(InputError):  # the answer will show the error
            _call(self._client, "POST", f"/v1/sessions/{self.session}/stop")

    def fork(self) -> "Conversation":
        """Return a new branch that begins as a copy of this one."""
        identity = _call(self._client, "POST", f"/v1/sessions/{self.session}/fork", json={})
        return Conversation(self._client, self._settings, identity)

    def rewind(self, num_turns: int) -> None:
        """Remove the last answers and their messages.

        Raises:
            InputError: the session has fewer turns.
        """
        _call(self._client, "POST", f"/v1/sessions/{self.session}/rewind", json={"turns": num_turns})

    def state(self) -> bytes:
        """Return the state after the last answer, as the content of a state file.

        Raises:
            InputError: there is no answer yet.
        """
        return _request(self._client, "GET", f"/v1/sessions/{self.session}/state").content


def connect(address: str, key: str | None, *, is_local: bool = False) -> httpx.Client:
    """Return an HTTP client of a server.

    Raises:
        InputError: `address` is not the address of a server.
    """
    headers = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
    # A server in this process is reached without a proxy.
    transport = httpx.HTTPTransport() if is_local else None
    try:
        return httpx.Client(
            base_url=address.rstrip("/").removesuffix("/v1"), headers=headers, timeout=TIMEOUT,
            event_hooks={"response": [_check_status]}, transport=transport,
        )  # fmt: skip
    except (httpx.InvalidURL, ValueError) as error:
        raise InputError(f"target: {shown(address)} is not the address of a server ({error})") from None


def _fields(settings: GenerationSettings) -> Json:
    """The fields of a request for these settings, without settings that have their default value."""
    fields: Json = {
        "temperature": settings.temperature, "stop": list(settings.stop), "ignore_eos": not settings.stop_at_end
    }  # fmt: skip
    if settings.max_new_tokens is not None:
        fields["max_tokens"] = settings.max_new_tokens
    names = ("top_k", "top_p", "min_p", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty")
    return fields | {
        name: value for name in (*names, "logit_bias") if (value := getattr(settings, name)) != getattr(DEFAULTS, name)
    }


def _events(response: httpx.Response) -> Iterator[Json]:
    for line in response.iter_lines():
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))
    raise InputError("server: the connection broke during an answer")


def _call(client: httpx.Client, method: str, path: str, **content: Any) -> str:
    """Make a request about a session, and return the session's id."""
    response = _request(client, method, path, **content)
    try:
        return str(response.json()["id"])
    except (ValueError, KeyError, TypeError):
        raise InputError(f"target: {client.base_url} is not a server of multilin") from None


def _request(client: httpx.Client, method: str, path: str, **content: Any) -> httpx.Response:
    with _reaching(client):
        return client.request(method, path, **content)


def _check_status(response: httpx.Response) -> None:
    """Refuse answers with the status of an error; called with every response."""
    if response.is_error:
        response.read()
        try:
            reason = response.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            reason = f"answered with status {response.status_code} and gave no reason"
        raise InputError(f"server: {reason}")


@contextlib.contextmanager
def _reaching(client: httpx.Client) -> Iterator[None]:
    try:
        yield
    except (httpx.HTTPError, UnicodeError) as error:  # UnicodeError: a host name such as a..b
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"target: {client.base_url} does not answer ({reason})") from None
