"""The verb in a process of its own: killed, stopped, and given what is no request."""

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from multilin.data.tokenizers import train_tokenizer
from multilin.inference.generate_run import text_codec
from multilin.inference.torch_engine import TorchEngine
from multilin.model.factory import create_model
from multilin.runs.load import Run
from multilin.serving import app
from multilin.serving.service import Service
from multilin.serving.settings import ServeLimits
from tests.serving.conftest import Server, Start

Launch = Callable[..., tuple[str, subprocess.Popen[str]]]


@pytest.fixture
def launch(run: Run) -> Iterator[Launch]:
    """launch("--port", "0"): the address of `multilin serve` and its process."""
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: str) -> tuple[str, subprocess.Popen[str]]:
        command = [sys.executable, "-m", "multilin", "serve", str(run.folder), "--engine", "torch", "--port", "0"]
        process = subprocess.Popen(
            [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        started.append(process)
        assert process.stdout is not None
        address = re.search(r"http://\S+", process.stdout.readline())
        assert address is not None, process.stderr.read() if process.stderr else ""
        for _ in range(200):
            try:
                httpx.get(f"{address[0]}/health")
                break
            except httpx.TransportError:
                time.sleep(0.05)
        return address[0], process

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def post(url: str, **body: Any) -> Any:
    answer = httpx.post(url, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.slow
def test_killed_during_twenty_turns_nothing_that_was_finished_is_lost(launch: Launch, tmp_path: Path) -> None:
    url, process = launch("--sessions", str(tmp_path))
    sessions = [post(f"{url}/v1/sessions")["id"] for _ in range(20)]
    post(f"{url}/v1/completions", prompt="x", max_tokens=2)  # the first may wait until kernels are compiled
    finished: list[tuple[str, str]] = []

    def talk(session: str) -> None:
        for number in range(1000):
            body = {"prompt": f"turn {number}", "max_tokens": 5 + number % 7, "session": session}
            try:
                text = post(f"{url}/v1/completions", **body)["choices"][0]["text"]
            except httpx.TransportError:
                return
            finished.append((session, text))

    with ThreadPoolExecutor(20) as pool:
        talks = [pool.submit(talk, session) for session in sessions]
        time.sleep(4)
        process.send_signal(signal.SIGKILL)
        for one in talks:
            one.result()
    assert len(finished) > 40
    url, process = launch("--sessions", str(tmp_path))
    for session in sessions:
        turns = httpx.get(f"{url}/v1/sessions/{session}", timeout=30).json()["turns"]
        kept, expected = [turn["text"] for turn in turns], [text for name, text in finished if name == session]
        assert kept[: len(expected)] == expected
        assert len(kept) <= len(expected) + 1
        usage = post(f"{url}/v1/completions", prompt="x", max_tokens=1, session=session)["usage"]
        assert usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"] <= 2
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 128 + signal.SIGTERM


@pytest.mark.slow
def test_a_signal_lets_streams_end(launch: Launch) -> None:
    url, process = launch()
    with httpx.stream(
        "POST",
        f"{url}/v1/completions",
        json={"prompt": "a", "max_tokens": 60, "stream": True, "ignore_eos": True},
        timeout=30,
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        process.send_signal(signal.SIGINT)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    _, errors = process.communicate(timeout=20)
    assert process.returncode in (0, 130)
    assert "Traceback" not in errors


VALUES = [
    None, True, -1, 0, 10**30, 1.5, float("inf"), "", "x" * 5000, "\ud800", "\0", "ü😀", [], [[]], {}, {"a": []},
    [1, "a"], [None] * 9, {"role": "user"}, [{"role": "user", "content": None}], "turn_" + "a" * 22, "../../etc/passwd",
]  # fmt: skip
FIELDS = [
    "prompt", "messages", "max_tokens", "n", "temperature", "top_p", "stop", "stream", "logit_bias", "seed", "echo",
    "logprobs", "stream_options", "session", "model", "turn", "turns", "tokens", "store", "tools", "é", "",
]  # fmt: skip
PATHS = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/sessions",
         "/v1/sessions/x/fork", "/v1/sessions/session_aaaaaaaaaaaaaaaaaaaaaa/rewind", "/v1/nothing"]  # fmt: skip


def malformed(draw: random.Random) -> tuple[str, bytes]:
    """A path, and a body that is wrong in one of many ways."""
    body: dict[str, Any] = {name: draw.choice(VALUES) for name in draw.sample(FIELDS, draw.randint(1, 4))}
    content = json.dumps(body | {"unknown_field": 1}).encode()
    kind = draw.randrange(5)
    if kind == 0:
        content = content[: draw.randrange(1, len(content))]
    elif kind == 1:
        content = bytes(draw.randrange(256) for _ in range(draw.randrange(1, 200)))
    elif kind == 2:
        content = b"[" * draw.randrange(1, 50_000)
    return draw.choice(PATHS), content


def broken(server: Server, draw: random.Random) -> None:
    """A connection that is no request, or ends within one."""
    heads = (
        b"\0\1\2\3\r\n\r\n", b"GET",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{",
        b"GET / HTTP/9.9\r\n\r\n", b"A" * 100_000, b"POST /tokenize HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    )  # fmt: skip
    with server.connect() as connection:
        try:
            connection.sendall(draw.choice(heads))
            connection.shutdown(socket.SHUT_WR)
            assert b"HTTP/1.1 5" not in connection.recv(1000)
        except (ConnectionError, TimeoutError):
            pass


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_malformed_requests_get_a_sentence(start: Start, count: int, caplog: pytest.LogCaptureFixture) -> None:
    server, draw = start(), random.Random(count)
    with httpx.Client(base_url=server.url, timeout=30) as client:
        for number in range(count):
            if number % 10 == 0:
                broken(server, draw)
                continue
            path, content = malformed(draw)
            answer = client.post(path, content=content, headers={"Content-Type": "application/json"})
            assert 400 <= answer.status_code < 500, (path, content, answer.text)
            assert len(answer.json()["error"]["message"]) > 10
    assert not [record for record in caplog.records if record.exc_info]
    assert server.post("/v1/completions", prompt="a", max_tokens=2)["usage"]["completion_tokens"] == 2


def test_mistakes_of_the_command_line(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from multilin.cli.main import main

    monkeypatch.delenv("MULTILIN_API_KEY", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for arguments, words in (
            (["--host", "0.0.0.0"], "--host: 0.0.0.0 can be reached by others"),
            (["--memory", "much"], "--memory: 'much' given"),
            (["--api-key", ""], "--api-key: an empty text"),
            (["--port", str(taken.getsockname()[1])], "cannot be listened on"),
            (["--host", "a..b", "--insecure"], "a..b:8000 cannot be listened on"),
            (["--slots", "0"], "--slots: 0 given"),
        ):
            assert main(["serve", str(run.folder), *arguments]) == 2
            assert words in capsys.readouterr().err
    assert main(["serve", os.devnull]) == 2


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ("https://app.example.org", "https://app.example.org"),
        ("https://App.Example.org/", "https://app.example.org"),
        ("https://app.example.org:443", "https://app.example.org"),
        ("http://app.example.org:443", "http://app.example.org:443"),
        ("http://localhost:3000/", "http://localhost:3000"),
        ("http://[0:0::1]:8080", "http://[::1]:8080"),
        ("tauri://localhost", "tauri://localhost"),
        ("*", "*"),
        *((wrong, None) for wrong in (
            "app.example.org", "localhost:3000", "//app.example.org", "https://", "https://*.example.org",
            "https://app.example.org/page", "https://app.example.org?", "https://me@app.example.org", "http://[::x]",
            "https://app.example.org:port", "null", "", " ",
        )),
    ],
)  # fmt: skip
def test_an_origin_is_understood_as_browsers_send_it_or_refused(
    run: Run, capsys: pytest.CaptureFixture[str], given: str, sent: str | None
) -> None:
    from multilin.cli.main import main
    from multilin.cli.serve import _origin

    if sent is not None:
        assert _origin(given) == sent
        return
    for origins in (given, f"https://example.org, {given}"):
        assert main(["serve", str(run.folder), "--cors", origins]) == 2
        assert f"--cors: {given.strip()!r} given, but it should be an origin such as" in capsys.readouterr().err


def test_a_server_whose_model_is_loaded_says_so(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers /health soon, and other requests as soon as it can, or with an error that clients understand."""
    monkeypatch.setattr(app, "HELD_SECONDS", 0.3)
    monkeypatch.setattr(app, "HELD_HEALTH_SECONDS", 0.1)
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    body = {"prompt": "a", "max_tokens": 1}
    with app.Server(listener) as server, ThreadPoolExecutor(1) as pool:
        for method, path in (("GET", "/health"), ("HEAD", "/health"), ("POST", "/v1/completions"), ("GET", "/metrics")):
            answer = httpx.request(method, url + path, json=body, timeout=30)
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "1"
            if method != "HEAD":
                assert answer.json()["error"]["message"] == "the model is still being loaded; try again"
        with pytest.raises(openai.InternalServerError, match="still being loaded"):
            openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0).models.list()
        monkeypatch.setattr(app, "HELD_SECONDS", 60.0)
        waiting = pool.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=60)
        service = Service(TorchEngine(run.model), text_codec(run.tokenizer), run.folder, None, ServeLimits())
        server.open(app.create_app(service), service)
        assert waiting.result().status_code == 200
        assert httpx.get(f"{url}/health").json() == {"status": "ok"}
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


def test_models_of_other_packages_are_not_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from multilin.cli.main import main

    tokenizer = train_tokenizer([""], "byte", None)
    create_model("gpt2", hidden_size=8, num_layers=1, vocab_size=len(tokenizer), n_positions=16).save_pretrained(
        tmp_path
    )
    tokenizer.save_pretrained(tmp_path)
    for verb in (["serve", str(tmp_path), "--port", "0"], ["chat", str(tmp_path)]):
        assert main(verb) == 2
        assert "run: a gpt2 model keeps no state" in capsys.readouterr().err
