"""Servers in their own processes, and clients that stream from them."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

Body = dict[str, Any]
START_SECONDS = 300.0  # for a server to load its model
ROOT = Path(__file__).parents[1]


@dataclass
class Server:
    """A server on a port of this machine.

    pid: process id.
    path: the path of the completions endpoint.
    fields: sent with every request.
    """

    pid: int
    port: int
    path: str
    fields: Body

    def call(self, *bodies: Body) -> list["Reply"]:
        """The answers to requests sent at the same time."""

        async def all_at_once() -> list[Reply]:
            return await asyncio.gather(*(self.send(body) for body in bodies))

        return asyncio.run(all_at_once())

    async def send(self, body: Body, path: str | None = None, most_bytes: int | None = None) -> "Reply":
        """The answer to one request. The client hangs up after `most_bytes` bytes, if given."""
        content = json.dumps(body if path else {**self.fields, **body}).encode()
        # HTTP/1.0: the answer ends with the connection. A cheap client leaves the CPU to the server.
        head = f"POST {path or self.path} HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        begin = time.perf_counter()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        received, first = bytearray(), 0.0
        while piece := await reader.read(65536):
            received += piece
            if not first and received.partition(b"\r\n\r\n")[2]:  # the body has begun
                first = time.perf_counter() - begin
            if most_bytes is not None and len(received) >= most_bytes:
                break
        seconds = time.perf_counter() - begin
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        return Reply(bytes(received), first, seconds)


@dataclass
class Reply:
    """The answer to a request.

    received: status line, headers and body.
    first_seconds, seconds: time from the request to the first byte of the body, and to its end.
    """

    received: bytes
    first_seconds: float
    seconds: float

    @property
    def body(self) -> str:
        """The text after the headers.

        Raises:
            RuntimeError: the request was refused.
        """
        head, _, body = self.received.partition(b"\r\n\r\n")
        if b" 200 " not in head.partition(b"\r\n")[0]:
            raise RuntimeError(self.received.decode(errors="replace")[:500])
        return body.decode()

    @property
    def events(self) -> list[Body]:
        """The events of a stream."""
        lines = [line.removeprefix("data: ") for line in self.body.splitlines() if line.startswith("data: {")]
        events = [json.loads(line) for line in lines]
        if failed := [event for event in events if "error" in event]:
            raise RuntimeError(str(failed[0])[:500])
        return events

    @property
    def text(self) -> str:
        """The text of a stream."""
        return "".join(choice.get("text") or "" for event in self.events for choice in event["choices"])

    @property
    def num_tokens(self) -> int:
        """The number of generated tokens, from the last event of a stream."""
        counts = [event["usage"]["completion_tokens"] for event in self.events if event.get("usage")]
        return int(counts[-1])


@contextlib.contextmanager
def multilin(folder: Path, *flags: str) -> Iterator[Server]:
    """`multilin serve` with the model of a folder, until the block ends."""
    command = [sys.executable, "-m", "multilin", "serve", str(folder), "--port", "0", *flags]
    with _process(command, {}) as (process, printed):
        deadline = time.monotonic() + START_SECONDS
        while "http://" not in (text := printed()):
            _check_alive(process, text, deadline)
        port = int(text.partition("http://127.0.0.1:")[2].split()[0])
        fields = {"stream": True, "ignore_eos": True, "stream_options": {"include_usage": True}}
        yield Server(process.pid, port, "/v1/completions", fields)


@contextlib.contextmanager
def transformers(folder: Path, *flags: str) -> Iterator[Server]:
    """`transformers serve` with the model of a folder, until the block ends."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program = str(Path(sys.executable).with_name("transformers"))
    place = ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    with _process([program, "serve", str(folder), *place, *flags], {"HF_HUB_OFFLINE": "1"}) as (process, printed):
        deadline = time.monotonic() + START_SECONDS
        while not _is_healthy(port):
            _check_alive(process, printed(), deadline)
        yield Server(process.pid, port, "/v1/completions", {"stream": True, "model": str(folder)})


def _is_healthy(port: int) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _check_alive(process: "subprocess.Popen[bytes]", printed: str, deadline: float) -> None:
    if process.poll() is not None or time.monotonic() > deadline:
        raise RuntimeError(f"{process.args} does not answer; it printed:\n{printed[-3000:]}")
    time.sleep(0.1)


@contextlib.contextmanager
def _process(command: list[str], environment: dict[str, str]) -> Iterator[Any]:
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT
        )

        def printed() -> str:
            output.seek(0)
            return output.read()

        try:
            yield process, printed
        except Exception as error:
            error.add_note(f"the server printed:\n{printed()[-3000:]}")
            raise
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
