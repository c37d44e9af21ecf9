"""Sessions and stored turns."""

import dataclasses
import errno
import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from multilin.errors import InputError
from multilin.files import partial_path
from multilin.inference.text import TextCodec
from multilin.serving import sessions
from multilin.serving.folder import Folder, new_id
from multilin.serving.generation import Generation
from multilin.serving.jobs import Job
from multilin.serving.sessions import NOBODY
from multilin.serving.settings import ServeLimits
from multilin.serving.turns import Turn, TurnStore
from multilin.settings import load_settings
from tests.serving.conftest import Server, Start, until

GREEDY = {"temperature": 0, "max_tokens": 8}


def add(server: Server, session: str, prompt: str) -> str:
    return server.post("/v1/completions", prompt=prompt, session=session, **GREEDY)["choices"][0]["text"]


def test_memory_keeps_the_sessions_that_were_changed_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MOST_IN_MEMORY", 2)
    store = sessions.SessionStore(None)
    first, second = (store.create(NOBODY, []) for _ in range(2))
    store.save(first)
    third = store.create(NOBODY, [])
    assert {session.id for session in store.all(NOBODY)} == {first.id, third.id}
    assert store.get(NOBODY, second.id) is None
    store.remove(first)
    store.create(NOBODY, [])
    assert store.get(NOBODY, third.id) is not None


def test_forks_and_rewinds_go_on_where_the_text_stood(server: Server) -> None:
    session = server.post("/v1/sessions")["id"]
    first, second = add(server, session, "one"), add(server, session, "two")
    turns = server.call("GET", f"/v1/sessions/{session}")["turns"]
    assert [turn["prompt"] for turn in turns] == ["one", "two"]
    assert [turn["text"] for turn in turns] == [first, second]
    assert [turn["parent"] for turn in turns] == [None, turns[0]["id"]]
    assert [turn["tokens"] for turn in turns] == [1 + 3 + 8, 1 + 3 + 8 + 3 + 8]
    assert all(turn["state_bytes"] > 0 for turn in turns)

    fork = server.post(f"/v1/sessions/{session}/fork", turn=turns[0]["id"])
    assert [turn["id"] for turn in fork["turns"]] == [turns[0]["id"]]
    assert add(server, fork["id"], "two") == second
    assert server.post(f"/v1/sessions/{session}/rewind", turns=1)["turn"] == turns[0]["id"]
    assert add(server, session, "two") == second
    branch = server.post("/v1/sessions", turn=turns[1]["id"])["id"]
    assert add(server, branch, "three") == add(server, session, "three")

    server.call("DELETE", f"/v1/sessions/{session}")
    server.call("GET", f"/v1/sessions/{session}", status=404)
    assert all(turn["kept"] for turn in server.call("GET", f"/v1/sessions/{fork['id']}")["turns"])
    server.call("POST", f"/v1/sessions/{fork['id']}/rewind", {"turns": 9}, 400)
    server.call("POST", f"/v1/sessions/{fork['id']}/fork", {"turn": turns[1]["id"]}, 404)


def test_one_keys_sessions_are_invisible_to_another(start: Start) -> None:
    server = start(keys=["alphä", "beta"])
    alpha, beta = (
        {"Authorization": f"{scheme} {key}".encode()} for scheme, key in (("Bearer", "alphä"), ("bearer", "beta"))
    )
    body = {"prompt": "abc" * 20, **GREEDY}
    server.call("POST", "/v1/completions", body, 401)
    server.call("POST", "/v1/completions", body, 401, headers={"Authorization": "Bearer gamma"})
    assert server.call("GET", "/health") == {"status": "ok"}
    session = server.call("POST", "/v1/sessions", {}, headers=alpha)["id"]
    answer = server.call("POST", "/v1/completions", body | {"session": session}, headers=alpha)
    turn = answer["choices"][0]["turn"]
    longer = body | {"prompt": body["prompt"] + answer["choices"][0]["text"] + "d", "store": False}
    cached = [
        server.call("POST", "/v1/completions", longer, headers=key)["usage"]["prompt_tokens_details"]["cached_tokens"]
        for key in (alpha, beta)
    ]
    assert cached == [68, 0]
    for method, path, given in (
        ("GET", f"/v1/sessions/{session}", None), ("GET", f"/v1/sessions/{session}/state", None),
        ("POST", f"/v1/sessions/{session}/fork", None), ("DELETE", f"/v1/sessions/{session}", None),
        ("POST", "/v1/sessions", {"turn": turn}), ("POST", "/v1/completions", body | {"session": session}),
    ):  # fmt: skip
        server.call(method, path, given, 404, headers=beta)
    assert server.call("GET", "/v1/sessions", headers=beta)["data"] == []
    assert len(server.call("GET", "/v1/sessions", headers=alpha)["data"]) == 1


def test_a_session_is_continued_by_one_request_at_a_time(start: Start) -> None:
    server = start()
    session = server.post("/v1/sessions")["id"]
    body = {"prompt": "abc", "max_tokens": 300, "session": session, "ignore_eos": True}
    answers: list[httpx.Response] = []
    thread = threading.Thread(
        target=lambda: answers.append(httpx.post(server.url + "/v1/completions", json=body, timeout=60))
    )
    thread.start()
    until(lambda: session in server.service.busy)
    error = server.call("POST", "/v1/completions", body, 409)["error"]
    assert error["code"] == "session_busy"
    thread.join()
    assert answers[0].status_code == 200
    assert server.post("/v1/completions", **body | {"max_tokens": 1})["session"] == session


def test_a_request_that_was_prepared_while_another_one_ended_is_refused(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would go on from a turn that is not the last one any more, and that one would be lost."""
    server = start()
    session = server.post("/v1/sessions")["id"]
    add(server, session, "one")
    encode, slow, is_encoding = TextCodec.encode_more, threading.Event(), threading.Event()

    def wait(codec: TextCodec, text: str) -> list[int]:
        if text == "slow":
            is_encoding.set()
            assert slow.wait(20)
        return encode(codec, text)

    monkeypatch.setattr(TextCodec, "encode_more", wait)
    with ThreadPoolExecutor(1) as pool:
        body = {"prompt": "slow", "session": session, **GREEDY}
        late = pool.submit(httpx.post, server.url + "/v1/completions", json=body, timeout=30)
        assert is_encoding.wait(20)
        add(server, session, "two")
        slow.set()
        assert late.result().status_code == 409
    turns = server.call("GET", f"/v1/sessions/{session}")["turns"]
    assert [turn["prompt"] for turn in turns] == ["one", "two"]
    add(server, session, "three")


@pytest.fixture
def session(server: Server) -> str:
    """A session with a turn."""
    created: str = server.post("/v1/sessions")["id"]
    add(server, created, "one")
    return created


CHANGES = pytest.mark.parametrize(
    ("method", "path", "body"), [("POST", "/rewind", {"turns": 1}), ("DELETE", "", None)], ids=["rewind", "delete"]
)


@CHANGES
def test_a_session_that_a_request_has_just_continued_is_not_changed_as_it_was_before(
    server: Server, session: str, monkeypatch: pytest.MonkeyPatch, method: str, path: str, body: Any
) -> None:
    get = server.service.sessions.get

    def get_late(owner: str, session_id: str) -> sessions.Session | None:
        monkeypatch.undo()
        found = get(owner, session_id)
        add(server, session, "two")
        return found

    monkeypatch.setattr(server.service.sessions, "get", get_late)
    server.call(method, f"/v1/sessions/{session}{path}", body, 409)
    assert [turn["prompt"] for turn in server.call("GET", f"/v1/sessions/{session}")["turns"]] == ["one", "two"]
    server.call(method, f"/v1/sessions/{session}{path}", body)


@CHANGES
def test_a_session_is_not_continued_while_it_is_changed(
    server: Server, session: str, monkeypatch: pytest.MonkeyPatch, method: str, path: str, body: Any
) -> None:
    step = "save" if path else "remove"
    change = getattr(server.service.sessions, step)

    def change_late(changed: sessions.Session) -> None:
        monkeypatch.undo()
        server.call("POST", "/v1/completions", {"prompt": "two", "session": session, **GREEDY}, 409)
        assert not server.post(f"/v1/sessions/{session}/stop")["stopped"]
        change(changed)

    monkeypatch.setattr(server.service.sessions, step, change_late)
    server.call(method, f"/v1/sessions/{session}{path}", body)


@pytest.mark.parametrize("is_fork", [True, False])
def test_a_session_keeps_the_turns_of_another_one_that_is_deleted_meanwhile(
    server: Server, session: str, is_fork: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = server.call("GET", f"/v1/sessions/{session}")["turn"]
    delete = threading.Thread(target=server.call, args=("DELETE", f"/v1/sessions/{session}"))
    create = server.service.sessions.create

    def create_late(owner: str, turns: list[str]) -> sessions.Session:
        delete.start()
        delete.join(0.3)  # it waits for the end of this request
        return create(owner, turns)

    monkeypatch.setattr(server.service.sessions, "create", create_late)
    path = f"/v1/sessions/{session}/fork" if is_fork else "/v1/sessions"
    other = server.post(path, turn=turn)["id"]
    delete.join()
    server.call("GET", f"/v1/sessions/{session}", status=404)
    assert [found["kept"] for found in server.call("GET", f"/v1/sessions/{other}")["turns"]] == [True]
    server.call("DELETE", f"/v1/sessions/{other}")
    server.call("POST", "/v1/sessions", {"turn": turn}, 404)


def test_an_answer_can_be_stopped_before_it_begins(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start()
    session = server.post("/v1/sessions")["id"]
    prepare, stopped = server.service._jobs, threading.Event()

    def wait(generation: Generation) -> list[Job]:
        assert stopped.wait(20)
        return prepare(generation)

    monkeypatch.setattr(server.service, "_jobs", wait)
    with ThreadPoolExecutor(1) as pool:
        body = {"prompt": "abc", "max_tokens": 300, "session": session, "ignore_eos": True}
        answer = pool.submit(server.post, "/v1/completions", **body)
        until(lambda: session in server.service.busy)
        assert server.post(f"/v1/sessions/{session}/stop")["stopped"]
        stopped.set()
        assert answer.result()["usage"]["completion_tokens"] < 300


def test_a_server_that_starts_again_goes_on(start: Start, tmp_path: Path) -> None:
    """And servers that share a folder continue each other's sessions."""
    before, same = start(folder=tmp_path), start(folder=tmp_path, memory="0.001KB")
    session = before.post("/v1/sessions")["id"]
    add(before, session, "one")
    expected = before.post(f"/v1/sessions/{session}/fork")["id"]
    after = start(folder=tmp_path)
    texts = [add(server, name, "two") for server, name in ((before, expected), (after, session))]
    assert texts[0] == texts[1]
    assert add(same, session, "three") == add(before, expected, "three")
    assert same.service.turns.num_bytes < 20_000


def test_a_folder_for_sessions_is_checked_before_there_are_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="sessions: an empty text given"):
        load_settings(ServeLimits, {"sessions": ""})
    monkeypatch.setattr("os.access", lambda *_: False)  # as on a disk that is read-only
    with pytest.raises(InputError, match=r"--sessions: .* cannot be written; permission is missing"):
        Folder(str(tmp_path))


def test_a_damaged_turn_hides_no_other(start: Start, tmp_path: Path) -> None:
    server = start(folder=tmp_path)
    session = server.post("/v1/sessions")["id"]
    add(server, session, "one"), add(server, session, "two")
    last = server.call("GET", f"/v1/sessions/{session}")["turn"]
    next(tmp_path.rglob(f"{last}*.json")).write_text("{")
    again = start(folder=tmp_path)
    found = again.call("GET", f"/v1/sessions/{session}")["turns"]
    assert [turn["kept"] for turn in found] == [True, False]
    again.post(f"/v1/sessions/{session}/rewind", turns=1)
    assert add(again, session, "three")


@pytest.fixture
def turns() -> list[Turn]:
    return [
        Turn(new_id("turn"), NOBODY, None, "completion", "", str(n), None, [1, 2, n, 4], 3, 0, 1000.0 + n)
        for n in range(1000)
    ]


@pytest.mark.slow
def test_a_thousand_turns_on_disk(turns: list[Turn], tmp_path: Path) -> None:
    """A new store finds each, by its id and by its tokens, and holds only so many in memory."""
    store = TurnStore(Folder(str(tmp_path)), 50_000)
    for turn in turns:
        store.add(turn, b"x" * 1000)
    begin = time.monotonic()
    store = TurnStore(Folder(str(tmp_path)), 50_000)
    assert time.monotonic() - begin < 2
    assert len(store) == 1000
    for turn in turns[::37]:
        assert store.get(turn.owner, turn.id) == (turn, b"x" * 1000)
        found = store.longest(turn.owner, [*turn.token_ids[:3], 9, 9])
        assert found is not None
        assert found[0] == turn
        assert store.longest(turn.owner, turn.token_ids[:3]) is None
        assert store.get("1" * 16, turn.id) is None
    assert store.num_bytes <= 50_000
    next(tmp_path.rglob(f"{turns[0].id}.*.json")).write_text("{")
    store = TurnStore(Folder(str(tmp_path)), 0)
    assert store.longest(turns[0].owner, [1, 2, 0, 4]) is None
    assert store.longest(turns[1].owner, [1, 2, 1, 4]) is not None


def test_a_turn_of_an_earlier_version_is_read(turns: list[Turn], tmp_path: Path) -> None:
    TurnStore(Folder(str(tmp_path)), 0).add(turns[0], b"x")
    (file,) = tmp_path.rglob(f"{turns[0].id}.*.json")
    file.write_text(json.dumps(dataclasses.asdict(turns[0]) | {"answer": None}))
    assert TurnStore(Folder(str(tmp_path)), 0).get(NOBODY, turns[0].id) == (turns[0], b"x")


def test_states_that_a_killed_server_left_are_deleted_after_an_hour(turns: list[Turn], tmp_path: Path) -> None:
    store = TurnStore(Folder(str(tmp_path)), 10_000)
    for turn in (turns[0], dataclasses.replace(turns[1], created=time.time()), turns[2]):
        store.add(turn, b"x" * 1000)
    for turn in turns[:2]:
        next(tmp_path.rglob(f"{turn.id}.*.json")).unlink()  # it is written after the state
    TurnStore(Folder(str(tmp_path)), 0)
    assert [len(list(tmp_path.rglob(f"{turn.id}.*.safetensors"))) for turn in turns[:3]] == [0, 1, 1]


def test_turns_that_another_server_deleted_make_no_turn_too_many(turns: list[Turn], tmp_path: Path) -> None:
    stores = [TurnStore(Folder(str(tmp_path)), 10_000, disk_bytes=8000) for _ in range(2)]
    for turn in turns[:5]:
        stores[0].add(turn, b"x" * 1000)
    stores[1].clean()
    for turn in turns[1:5]:
        stores[0].remove(turn.owner, turn.id)
    for turn in turns[5:8]:
        stores[1].add(turn, b"x" * 1000)
    stores[1].clean()
    assert stores[1].peek(turns[0].owner, turns[0].id) is not None
    assert len(stores[1]) == 4


def test_files_that_a_killed_server_did_not_finish_are_deleted_after_an_hour(turns: list[Turn], tmp_path: Path) -> None:
    TurnStore(Folder(str(tmp_path)), 10_000).add(turns[0], b"x")
    kept = next(tmp_path.rglob(f"{turns[0].id}.*.json"))
    old, new = (partial_path(kept, token) for token in ("old", "new"))
    for path, age in ((old, 4000), (new, 3000)):
        path.write_bytes(b"x")
        os.utime(path, (time.time() - age,) * 2)
    TurnStore(Folder(str(tmp_path)), 0)
    assert [path.exists() for path in (kept, old, new)] == [True, False, True]


def test_an_answer_that_cannot_be_kept(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a full disk text is still answered, but nothing that a client would go on from."""
    session = server.post("/v1/sessions")["id"]
    first = add(server, session, "one")

    def refuse(name: str, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", name)

    with monkeypatch.context() as patch:
        patch.setattr(server.service.turns, "add", lambda turn, state: refuse(turn.id, state))
        choice = server.post("/v1/completions", prompt="one", **GREEDY)["choices"][0]
        assert (choice["text"], choice["turn"]) == (first, None)
        error = server.call("POST", "/v1/completions", {"prompt": "two", "session": session, **GREEDY}, 507)["error"]
        assert (error["type"], error["param"]) == ("server_error", "store")
    assert len(server.call("GET", f"/v1/sessions/{session}")["turns"]) == 1
    assert add(server, session, "two")


def test_old_turns_and_too_many_are_deleted(turns: list[Turn], tmp_path: Path) -> None:
    store = TurnStore(Folder(str(tmp_path)), 50_000, disk_bytes=30_000)
    for turn in turns[:100]:
        store.add(turn, b"x" * 1000)
    store.clean()
    assert 10 < len(store) < 30
    assert sum(path.stat().st_size for path in tmp_path.rglob("turn_*")) <= 30_000
    assert store.get(turns[99].owner, turns[99].id) is not None
    assert store.get(turns[0].owner, turns[0].id) is None
    young = dataclasses.replace(turns[200], created=time.time())
    store.add(young, b"y")
    store.seconds = 3600.0
    store.clean()
    assert len(store) == 1
    memory = TurnStore(None, 10_000)
    for turn in turns:
        memory.add(turn, b"x" * 1000)
    assert memory.num_bytes <= 10_000
    assert len(memory) < 10
