"""A server on a loopback port, in a thread, with a tiny model; and clients of it."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import uvicorn

from multilin.data.tokenizers import train_tokenizer
from multilin.export.folder import export_run
from multilin.inference.generate_run import text_codec
from multilin.inference.onnx_engine import OnnxEngine
from multilin.inference.torch_engine import TorchEngine
from multilin.model.factory import create_model
from multilin.runs.load import Run, load_run
from multilin.serving.app import create_app
from multilin.serving.service import Service
from multilin.serving.settings import ServeLimits
from tests.letters import write_letters

LONGEST = 8192


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run whose model writes lower-case letters and spaces, which depend on all it has read."""
    folder = tmp_path_factory.mktemp("served") / "tiny"
    tokenizer = train_tokenizer([""], "byte", None)
    torch.manual_seed(0)
    model = create_model("additive", hidden_size=16, num_layers=2, vocab_size=len(tokenizer), n_positions=LONGEST)
    write_letters(model, tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return load_run(folder)


@pytest.fixture(scope="session")
def export(run: Run) -> Path:
    """The export of the run."""
    folder = run.folder.parent / "tiny-onnx"
    export_run(run, folder)
    return folder


@dataclass
class Server:
    """A running server."""

    service: Service
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def call(self, method: str, path: str, body: Any = None, status: int = 200, **others: Any) -> Any:
        """The JSON of an answer, which has this status."""
        answer = httpx.request(method, self.url + path, json=body, timeout=60, **others)
        assert answer.status_code == status, (answer.status_code, answer.text)
        return answer.json()

    def post(self, path: str, **body: Any) -> Any:
        return self.call("POST", path, body)

    def stream(self, path: str, **body: Any) -> list[Any]:
        """The events of a stream, which ends in [DONE]."""
        text = httpx.post(self.url + path, json=body | {"stream": True}, timeout=60).text
        lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]", text
        return [json.loads(line) for line in lines[:-1]]

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)


Start = Callable[..., Server]


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    """Wait for a condition, and fail if it does not come in time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.001)


@pytest.fixture(scope="module")
def start(run: Run, request: pytest.FixtureRequest) -> Iterator[Start]:
    """start(engine="onnx", keys=[...]): a server that ends with the tests of the module."""
    ends: list[Callable[[], None]] = []

    def begin(
        engine: Any = "torch", *, slots: int = 64, queue: int = 64, memory: str = "100MB",
        folder: Path | str | None = None, max_prompt: int = 65536, **others: Any,
    ) -> Server:  # fmt: skip
        if engine == "torch":
            engine = TorchEngine(run.model)
        elif engine == "onnx":
            engine = OnnxEngine(request.getfixturevalue("export"), num_threads=1)
        sessions = None if folder is None else str(folder)
        limits = ServeLimits(slots=slots, queue=queue, memory=memory, sessions=sessions, max_prompt=max_prompt)
        service = Service(engine, text_codec(run.tokenizer), run.folder, None, limits)
        config = uvicorn.Config(
            create_app(service, **others), port=0, log_level="warning", lifespan="off", access_log=False
        )
        server = uvicorn.Server(config)
        listener = socket.create_server(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()

        def end() -> None:
            server.should_exit = True
            service.scheduler.stop(0)
            thread.join(20)
            listener.close()

        ends.append(end)
        return Server(service, listener.getsockname()[1])

    yield begin
    for end in ends:
        end()


@pytest.fixture(scope="module")
def server(start: Start) -> Server:
    """One with PyTorch."""
    return start()
