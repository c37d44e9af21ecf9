"""The verb that serves a model over HTTP."""

import contextlib
import functools
import re
import socket
from pathlib import Path

from pydantic_core import Url

from multilin.cli.export import open_engine
from multilin.cli.messages import check_installed, load
from multilin.errors import InputError, shown
from multilin.inference.settings import EngineName
from multilin.runs.files import is_export
from multilin.serving.settings import ServeLimits, split_keys
from multilin.settings import settings
from multilin.settings.bounds import Name, PathText, Port


@settings
class ServeArguments:
    """The model, and who may use it."""

    run: PathText  # folder of a trained or exported model
    host: Name = "127.0.0.1"  # address to listen on; needs a key if other machines can reach it
    port: Port = 8000  # port to listen on; 0 takes a free port
    api_key: str | None = None  # key that requests must send; separate several by commas; MULTILIN_API_KEY is safer
    insecure: bool = False  # let other machines send requests without a key
    cors: str | None = None  # origins of web pages that may call the server, separated by commas: https://example.org
    name: Name | None = None  # name of the model for clients; the folder's name if not given
    engine: EngineName = "auto"  # auto: ONNX Runtime on a CPU (the run is exported once), otherwise PyTorch


def serve(arguments: ServeArguments, limits: ServeLimits) -> None:
    """Serve a model over HTTP with OpenAI's API, and with sessions that continue from a kept state."""
    keys = _check(arguments)
    origins = [] if arguments.cors is None else [_origin(text.strip()) for text in arguments.cors.split(",")]
    folder = Path(arguments.run)
    with _listen(arguments) as listener:
        from multilin.serving.app import Server, create_app

        with Server(listener) as server:
            engine, codec = open_engine(folder, arguments.engine, is_server=True)
            from multilin.serving.service import Service

            service = Service(engine, codec, folder, arguments.name, limits)
            app = create_app(
                service, keys=keys, origins=origins, is_loopback=not keys and _is_loopback(arguments.host),
                load_run=None if is_export(folder) else functools.partial(load, folder),
            )  # fmt: skip
            server.open(app, service)
            host, port = listener.getsockname()[:2]
            _say(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", service.name, engine.name, bool(keys))
            server.wait()


def _check(arguments: ServeArguments) -> list[str]:
    """Return the keys. Refuse missing packages, and an address that other machines can reach if there is no key."""
    check_installed("serve:", "serve", "fastapi", "uvicorn", "prometheus_client")
    keys = split_keys(arguments.api_key)
    if arguments.api_key is not None and not keys:
        raise InputError("--api-key: an empty text given, but a key has at least one character")
    if not (keys or arguments.insecure or _is_loopback(arguments.host)):
        raise InputError(
            f"--host: {arguments.host} can be reached from other machines; give --api-key, or --insecure to use no key"
        )
    return keys


def _origin(text: str) -> str:
    """The origin of a page as browsers send it, in lower case and without the default port; `*` means any."""
    if text == "*":
        return text
    with contextlib.suppress(ValueError):
        origin = str(Url(text.lower())).removesuffix("/")
        if re.fullmatch(r"[a-z][a-z0-9+.-]*://(\w[\w.-]*|\[[0-9a-f:.]+\])(:[0-9]+)?", origin, re.ASCII):
            return origin
    raise InputError(
        f"--cors: {shown(text)} given, but it should be an origin such as https://example.org or "
        "http://localhost:3000, with a scheme and without a path, or * for any"
    )


def _is_loopback(host: str) -> bool:
    return host in ("127.0.0.1", "localhost", "::1")


def _listen(arguments: ServeArguments) -> socket.socket:
    """A socket that listens on the address; opened before a model is loaded."""
    try:
        family, _, _, _, address = socket.getaddrinfo(arguments.host, arguments.port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except (OSError, UnicodeError) as error:  # UnicodeError: no machine can have a name such as a..b
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"--port: multilin cannot listen on {arguments.host}:{arguments.port} ({reason})") from None


def _say(address: str, name: str, engine: str, has_key: bool) -> None:
    key = ' -H "Authorization: Bearer $MULTILIN_API_KEY"' if has_key else ""
    print(f"multilin serves {name} with the engine {engine} at http://{address}", flush=True)
    print(
        f"\ncurl http://{address}/v1/completions{key} -H 'Content-Type: application/json' "
        """-d '{"prompt": "Once upon a time", "max_tokens": 50}'""",
        flush=True,
    )
