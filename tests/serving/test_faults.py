"""Ten faults that other servers shipped, and one of our own."""

import json
import re
import socket
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from multilin.inference.torch_engine import TorchEngine
from multilin.model import TextState
from multilin.runs.load import Run
from multilin.serving.api import streams
from tests.serving.conftest import Server, Start, until
from tests.serving.engines import Script, Watched

PLAIN = {"temperature": 0, "ignore_eos": True}


def send(connection: socket.socket, path: str, **body: Any) -> None:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)


def choice_texts(events: list[Any]) -> list[str]:
    return [event["choices"][0]["text"] for event in events]


def test_1_a_stop_string_cut_across_tokens(server: Server) -> None:
    """Nothing of it is sent, nothing before it is lost, and a session goes on from the text that was seen."""
    body = {"prompt": "abc", "max_tokens": 60, "seed": 1, "ignore_eos": True}
    text = server.post("/v1/completions", **body)["choices"][0]["text"]
    for first in (7, 20, 33):
        stop = text[first : first + 5]
        expected = text[: text.index(stop)]
        session = server.post("/v1/sessions")["id"]
        pieces = choice_texts(server.stream("/v1/completions", **body, stop=["never", stop], session=session))
        assert "".join(pieces) == expected
        turn = server.call("GET", f"/v1/sessions/{session}")["turns"][0]
        assert turn["text"] == expected
        onward = server.post("/v1/completions", **PLAIN, prompt="xyz", session=session)
        alone = server.post("/v1/completions", **PLAIN, prompt=f"abc{expected}xyz", store=False)
        assert onward["choices"][0]["text"] == alone["choices"][0]["text"]
        assert onward["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]


@pytest.mark.parametrize("is_first", [True, False])
def test_a_text_that_a_stop_string_or_the_model_ended_goes_on_without_a_prompt(server: Server, is_first: bool) -> None:
    session = server.post("/v1/sessions")["id"]
    body, before = {"session": session, **PLAIN}, ""
    if not is_first:
        before = "one" + server.post("/v1/completions", prompt="one", max_tokens=4, **body)["choices"][0]["text"]
    text = server.post("/v1/completions", prompt=f"{before}abc", max_tokens=40, store=False, **PLAIN)
    end = text["choices"][0]["text"][20:]
    begun = server.post("/v1/completions", prompt="abc", max_tokens=40, stop=[end], **body)["choices"][0]["text"]
    assert len(begun) <= 20
    onward = server.post("/v1/completions", prompt="", max_tokens=20, **body)
    alone = server.post("/v1/completions", prompt=f"{before}abc{begun}", max_tokens=20, store=False, **PLAIN)
    assert onward["choices"][0]["text"] == alone["choices"][0]["text"]
    assert onward["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]
    ending = {"logit_bias": {str(server.service.codec.end_id): 1e6}, "temperature": 0, "session": session}
    assert server.post("/v1/completions", prompt="abc", **ending)["choices"][0]["finish_reason"] == "stop"
    assert server.post("/v1/completions", prompt="", max_tokens=5, **body)["choices"][0]["text"]
    turns = server.call("GET", f"/v1/sessions/{session}")["turns"]
    assert [turn["parent"] for turn in turns] == [None, *(turn["id"] for turn in turns[:-1])]


def test_2_a_character_cut_across_tokens(start: Start, run: Run, server: Server) -> None:
    text = "Grüße, 世界 😀! "
    ids = server.service.codec.encode(text)
    assert len(ids) > len(text)
    scripted = start(Script(TorchEngine(run.model), ids))
    body = {"prompt": "x", "max_tokens": len(ids), "temperature": 0}
    assert "".join(choice_texts(scripted.stream("/v1/completions", **body))) == text
    assert scripted.post("/v1/completions", **body)["choices"][0]["text"] == text
    cut = scripted.post("/v1/completions", **body | {"max_tokens": len("Grü".encode()) - 1})
    assert cut["choices"][0]["text"] == "Gr"


@pytest.mark.parametrize("length", range(1, 9))
def test_2_a_character_cut_across_turns(start: Start, run: Run, server: Server, length: int) -> None:
    """The next turn has the rest of it, and the unread tokens of a state begin with a character."""
    characters = [server.service.codec.encode(character) for character in "é€🙂"]
    scripted = start(Script(TorchEngine(run.model), [token for ids in characters for token in ids]))
    session = scripted.post("/v1/sessions")["id"]
    body = {"temperature": 0, "session": session}
    first = scripted.post("/v1/completions", **body, prompt="x", max_tokens=length)
    state = httpx.get(f"{scripted.url}/v1/sessions/{session}/state").content
    header = json.loads(state[8 : 8 + int.from_bytes(state[:8], "little")])
    assert json.loads(header["__metadata__"]["unread_ids"])[0][0] in [ids[0] for ids in characters]
    second = scripted.post("/v1/completions", **body, prompt="", max_tokens=9 - length)
    assert first["choices"][0]["text"] + second["choices"][0]["text"] == "é€🙂"


@pytest.mark.parametrize("is_streamed", [True, False])
def test_3_a_client_that_leaves(start: Start, run: Run, is_streamed: bool) -> None:
    """Its sequence leaves the batch, or the queue, and its session is what it was."""
    server = start(Watched(TorchEngine(run.model), 0.01), slots=1)
    session = server.post("/v1/sessions")["id"]
    scheduler = server.service.scheduler
    body = {"prompt": "abc", "max_tokens": 4000, "ignore_eos": True, "stream": is_streamed}
    with server.connect() as running, server.connect() as waiting:
        send(running, "/v1/completions", **body, session=session)
        until(lambda: scheduler.counts.running == 1)
        send(waiting, "/v1/completions", **body)
        until(lambda: scheduler.counts.waiting == 1)
    until(lambda: scheduler.counts == (0, 0, 0))
    after = server.post("/v1/completions", prompt="abc", max_tokens=2, session=session)
    assert after["usage"]["prompt_tokens"] == 4
    assert len(server.call("GET", f"/v1/sessions/{session}")["turns"]) == 1
    assert len(server.service.turns) == 1


def test_4_the_usage_chunk_only_if_asked_for(server: Server) -> None:
    body = {"prompt": "abc", "max_tokens": 3, **PLAIN}
    assert all(event["choices"] and "usage" not in event for event in server.stream("/v1/completions", **body))
    *others, last = server.stream("/v1/completions", **body, stream_options={"include_usage": True})
    assert all(event["choices"] for event in others)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3
    server.call("POST", "/v1/completions", body | {"stream_options": {"include_usage": True}}, 400)


def test_5_done_also_after_an_error(start: Start, run: Run) -> None:
    engine = Watched(TorchEngine(run.model))
    server = start(engine)

    def fail() -> None:
        if engine.num_read_tokens > 10:
            raise RuntimeError("no memory left")

    engine.before = fail
    *_, last = server.stream("/v1/completions", prompt="abc", max_tokens=30, **PLAIN)
    assert last["error"]["type"] == "server_error"
    assert "memory" not in last["error"]["message"]
    server.call("POST", "/v1/completions", {"prompt": "abc", "max_tokens": 30}, 500)
    engine.before = None
    assert len(server.post("/v1/completions", prompt="abc", max_tokens=30, **PLAIN)["choices"][0]["text"]) > 0


def test_an_error_between_prompt_and_text_is_told_to_all(
    start: Start, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests whose prompts were read together do not wait for ever if the first cannot join the batch."""
    engine = Watched(TorchEngine(run.model))
    server = start(engine)
    scheduler = server.service.scheduler
    joins, is_reading, gate = iter([False, True]), threading.Event(), threading.Event()
    join_state = TextState.join

    def join(batch: TextState, state: TextState) -> None:
        if batch is scheduler._batch and next(joins, False):
            raise RuntimeError("no memory left")
        join_state(batch, state)

    def wait() -> None:
        is_reading.set()
        assert gate.wait(20)

    monkeypatch.setattr(TextState, "join", join)
    engine.before = wait
    body = {"prompt": "abc", "max_tokens": 3, **PLAIN}
    with ThreadPoolExecutor(4) as pool:

        def ask() -> Future[httpx.Response]:
            return pool.submit(httpx.post, server.url + "/v1/completions", json=body, timeout=20)

        first = ask()
        assert is_reading.wait(20)
        others = [ask() for _ in range(3)]
        until(lambda: scheduler.counts.waiting == 3)
        gate.set()
        assert [answer.result().status_code for answer in others] == [500, 500, 500]
        assert first.result().status_code == 500  # in the batch, which may be changed in part
    assert server.post("/v1/completions", **body)["choices"][0]["text"]


@pytest.mark.parametrize("engine", ["torch", pytest.param("onnx", marks=pytest.mark.slow)])
def test_6_texts_at_once_are_those_alone(start: Start, engine: str) -> None:
    """Greedy and drawn, of different lengths, with several answers and longer prompts than a piece."""
    server = start(engine, slots=16)
    bodies = []
    for index in range(40):
        body = {"prompt": f"number {index} " * (1 + index % 4 * 5), "max_tokens": 10 + index % 30, "seed": index}
        body |= {"store": False, "ignore_eos": True, "temperature": 0 if index % 3 == 0 else 0.9}
        body |= [{}, {"top_p": 0.9}, {"top_k": 9, "repetition_penalty": 1.2}, {"n": 3}][index % 4]
        bodies.append(body)

    def texts(body: Any) -> list[str]:
        return [choice["text"] for choice in server.post("/v1/completions", **body)["choices"]]

    alone = list(map(texts, bodies))
    with ThreadPoolExecutor(40) as pool:
        assert list(pool.map(texts, bodies)) == alone
    assert len({text for both in alone for text in both}) > 30


def test_7_a_restored_state_is_used(start: Start, run: Run, tmp_path: Path) -> None:
    """The engine reads new tokens only; and files that are no state of the model change nothing."""
    engine = Watched(TorchEngine(run.model))
    server = start(engine, folder=tmp_path)
    session = server.post("/v1/sessions")["id"]
    server.post("/v1/completions", prompt="a" * 300, max_tokens=5, session=session, **PLAIN)
    whole = server.post("/v1/completions", prompt="b" * 7, max_tokens=5, store=False, **PLAIN)["usage"]
    assert whole["prompt_tokens_details"]["cached_tokens"] == 0
    before = engine.num_read_tokens
    usage = server.post("/v1/completions", prompt="b" * 7, max_tokens=5, session=session, **PLAIN)["usage"]
    assert usage["prompt_tokens"] == 301 + 5 + 7
    assert usage["prompt_tokens_details"]["cached_tokens"] == 301 + 4
    assert engine.num_read_tokens - before == 8 + 4

    header = {"Content-Type": "application/octet-stream"}
    state = httpx.get(f"{server.url}/v1/sessions/{session}/state").content
    imported = server.call("POST", "/v1/sessions", content=state, headers=header)
    texts = [
        server.post("/v1/completions", prompt="c", max_tokens=9, session=name, **PLAIN)["choices"][0]["text"]
        for name in (session, imported["id"])
    ]
    assert texts[0] == texts[1]
    other = state.replace(b"multilin-state-4", b"multilin-state-0")
    for content in (b"", b"x" * 100, state[:-10], state[:500], other, state[:-8] + b"\0\1\2\3\4\5\6\7"):
        error = server.call("POST", "/v1/sessions", content=content, headers=header, status=400)["error"]
        assert error["message"]
    assert len(server.call("GET", "/v1/sessions")["data"]) == 2


def test_8_a_full_queue(start: Start, run: Run) -> None:
    server = start(Watched(TorchEngine(run.model), 0.005), slots=1, queue=2)
    body = {"prompt": "abc", "max_tokens": 20, "ignore_eos": True}
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda _: httpx.post(f"{server.url}/v1/completions", json=body, timeout=60), range(12)))
    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(refused) + sum(answer.status_code == 200 for answer in answers) == 12
    assert 1 <= len(refused) <= 10
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
    assert refused[0].json()["error"]["type"] == "rate_limit_error"
    until(lambda: server.service.scheduler.counts.running == 0)
    server.post("/v1/completions", **body)


def test_more_prompts_than_may_wait_are_answered_one_after_the_other(start: Start) -> None:
    server = start(slots=3, queue=1)
    assert len(server.post("/v1/completions", prompt=["a", "b", "c"], max_tokens=2)["choices"]) == 3


def test_9_a_client_that_rewrites_history(start: Start, run: Run, tmp_path: Path) -> None:
    """A conversation that diverges goes on from the longest stored beginning, also of a server before."""
    engine = Watched(TorchEngine(run.model))
    server = start(engine, folder=tmp_path)
    messages = [{"role": "user", "content": "one two three"}]
    for words in ("four five", "six seven", "eight"):
        answer = server.post("/v1/chat/completions", messages=messages, max_tokens=10, **PLAIN)
        messages += [{"role": "assistant", "content": answer["choices"][0]["message"]["content"]}]
        messages += [{"role": "user", "content": words}]
    changed = [*messages[:3], {"role": "assistant", "content": "what I never said"}, *messages[4:]]
    for again in (server, start(engine, folder=tmp_path)):
        before = engine.num_read_tokens
        usage = again.post("/v1/chat/completions", messages=changed, max_tokens=1, store=False, **PLAIN)["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert cached > len("User:\none two three\n\nAssistant:\n")
        assert engine.num_read_tokens - before == usage["prompt_tokens"] - cached


def test_10_a_silent_stream_is_kept_open(start: Start, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "SILENCE", 0.05)
    server = start(Watched(TorchEngine(run.model), 0.3))
    text = httpx.post(
        f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 2, "stream": True}, timeout=30
    ).text
    assert re.findall("^: keep-alive$", text, re.MULTILINE)
    assert text.endswith("data: [DONE]\n\n")
