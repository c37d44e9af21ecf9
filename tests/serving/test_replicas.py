"""Servers that share a store continue each other's sessions: side by side, and on Ray Serve."""

import contextlib
import os
import re
import secrets
import socket
import time
from pathlib import Path

import httpx
import pytest
from starlette.testclient import TestClient

from multilin.errors import InputError
from multilin.runs.load import Run
from multilin.serving.ray_app import RayArguments, _build, app
from multilin.serving.settings import KEY_VARIABLE, ServeLimits
from tests.processes import PYTHON, running
from tests.serving.conftest import Start, until

RAY = """
import sys, time, ray
from ray import serve
from multilin.serving.ray_app import app
ray.init(num_cpus=2, include_dashboard=False, object_store_memory=10**8)
serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
serve.run(app(dict(word.split("=", 1) for word in sys.argv[2:])))
print("ready", flush=True)
time.sleep(600)
"""


def say(url: str, session: str, number: int, **headers: str) -> str:
    body = {"prompt": f"turn {number}", "max_tokens": 6, "seed": number, "session": session, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


@pytest.fixture(scope="module")
def alone(start: Start) -> list[str]:
    """What a session is told by one server."""
    server = start()
    session = server.post("/v1/sessions")["id"]
    return [say(server.url, session, number) for number in range(6)]


@pytest.mark.parametrize("kind", ["folder", "file", "memory"])
def test_two_servers_continue_each_others_sessions(start: Start, alone: list[str], tmp_path: Path, kind: str) -> None:
    """Turn by turn, without a wait: what one has written the other finds at once, also at addresses of fsspec."""
    folder = {"folder": str(tmp_path), "file": f"file://{tmp_path}", "memory": f"memory://{secrets.token_hex(4)}"}[kind]
    servers = [start(folder=folder), start(folder=folder)]
    session = servers[0].post("/v1/sessions")["id"]
    assert [say(servers[number % 2].url, session, number) for number in range(6)] == alone
    turns = servers[1].call("GET", f"/v1/sessions/{session}")["turns"]
    assert [turn["kept"] for turn in turns] == [True] * 6
    branch = servers[0].post("/v1/sessions", turn=turns[2]["id"])["id"]
    assert say(servers[1].url, branch, 3) == alone[3]
    servers[0].call("DELETE", f"/v1/sessions/{session}")
    kept = {turn["id"] for turn in servers[1].call("GET", f"/v1/sessions/{branch}")["turns"]}
    assert {name.partition(".")[0] for name in servers[0].service.turns.folder.sizes("turn_")} == kept
    assert session not in str(servers[1].call("GET", "/v1/sessions"))


@pytest.mark.slow
def test_two_replicas_on_ray(start: Start, export: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed (pip install 'multilin[ray]')")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [f"run={export}", f"sessions={tmp_path}", "replicas=2"]
    environment = {**os.environ, "MULTILIN_API_KEY": "key", "RAY_USAGE_STATS_ENABLED": "0"}
    server, url = start("onnx"), f"http://127.0.0.1:{port}"
    with running([*PYTHON, "-c", RAY, str(port), *words], environment) as program:
        until(lambda: "ready" in program.printed() or program.poll() is not None, 300)
        assert program.poll() is None
        headers = {"Authorization": "Bearer key"}
        assert _status(f"{url}/v1/models") == 401
        session = httpx.post(f"{url}/v1/sessions", headers=headers, json={}, timeout=60).json()["id"]
        own, used = server.post("/v1/sessions")["id"], dict[str, float]()
        for number in range(100):
            assert say(url, session, number, **headers) == say(server.url, own, number)
            figures = httpx.get(f"{url}/metrics", headers=headers).text
            used[_figure(figures, "multilin_generated_tokens_created")] = float(
                _figure(figures, "multilin_generated_tokens_total")
            )
            if len(used) == 2 and all(used.values()):
                break
        else:
            raise AssertionError(f"one replica answered all: {used}")
        body = {"prompt": "a", "max_tokens": 50, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{url}/v1/completions", headers=headers, json=body) as answer:
            pieces = list(answer.iter_raw())
        assert len(pieces) > 2
        assert pieces[-1].endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(("kind", "status"), [("run", 200), ("export", 400)])
def test_what_a_replica_read_is_shown(
    run: Run, export: Path, monkeypatch: pytest.MonkeyPatch, kind: str, status: int
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "key")
    replica = _build(RayArguments(run=str(run.folder if kind == "run" else export)), ServeLimits())
    with TestClient(replica, headers={"Authorization": "Bearer key"}) as client:
        session = client.post("/v1/sessions", json={}).json()["id"]
        client.post("/v1/completions", json={"prompt": "abc", "session": session, "max_tokens": 2})
        assert client.get(f"/v1/sessions/{session}/reading").status_code == status


def _status(url: str) -> int:
    """The status of an answer, once Ray's proxy listens and knows the application: late on a busy machine."""
    for _ in range(600):
        with contextlib.suppress(httpx.ConnectError):
            if (status := httpx.get(url, timeout=60).status_code) != 404:
                return status
        time.sleep(0.2)
    raise AssertionError(f"{url} does not answer")


def _figure(text: str, name: str) -> str:
    found = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
    assert found is not None
    return found[1]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"run": "x", "replicas": "2"}, "sessions: none given"),
        ({"run": "x", "replicas": "two"}, "replicas"),
        ({"run": "x", "slot": "2"}, "slot: unknown field; did you mean 'slots'"),
        ({"run": "x", "memory": "much"}, "memory: 'much' given"),
        ({}, "run"),
    ],
)
def test_wrong_settings_of_ray_are_refused(values: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(message)}"):
        app(values)
