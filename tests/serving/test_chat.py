"""`multilin chat` with a server and with a folder."""

import contextlib
import functools
import io
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from multilin.cli import chat
from multilin.cli.main import main
from multilin.inference.generate_run import text_codec
from multilin.inference.torch_engine import TorchEngine
from multilin.runs.load import Run
from tests.serving.conftest import LONGEST, Server, Start, until
from tests.serving.engines import Script, Watched

GREEDY = ("--temperature", "0", "--max-new-tokens", "12")
Talk = Callable[..., tuple[int, str, str]]


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Talk:
    """talk(target, "first message", "/quit", flags=[...]): status, stdout and stderr."""

    def run_chat(target: str, *lines: str, flags: tuple[str, ...] = GREEDY) -> tuple[int, str, str]:
        content = "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogateescape")
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content), "utf-8"))
        capsys.readouterr()
        status = main(["chat", target, *flags])
        return status, *capsys.readouterr()

    return run_chat


@pytest.fixture(params=["server", "folder"])
def target(request: pytest.FixtureRequest, server: Server, run: Run) -> tuple[str, tuple[str, ...]]:
    """Whom to talk with, and the flags for that."""
    return (server.url, GREEDY) if request.param == "server" else (str(run.folder), (*GREEDY, "--engine", "torch"))


def answers(server: Server, *messages: str, system: str | None = None) -> str:
    """The answers of the server's model to these messages, as chat prints them."""
    history = [] if system is None else [{"role": "system", "content": system}]
    text = ""
    for message in messages:
        history.append({"role": "user", "content": message})
        body = {"messages": history, "temperature": 0, "max_tokens": 12, "store": False}
        history.append(server.post("/v1/chat/completions", **body)["choices"][0]["message"])
        del history[-1]["refusal"]
        text += history[-1]["content"] + "\n"
    return text


def test_answers_are_those_of_the_api_also_after_forks_and_rewinds(
    talk: Talk, server: Server, target: tuple[str, tuple[str, ...]], tmp_path: Path
) -> None:
    place, flags = target
    one, two, three = (answers(server, "one", *rest) for rest in ((), ("two",), ("two", "three")))
    status, text, notes = talk(place, "one", "two", "", "three", flags=flags)
    assert (status, text) == (0, three), notes
    status, text, notes = talk(
        place, "one", "/rewind", "one", "/fork", "two", "/switch 1", "two", "/quit", "x", flags=flags
    )
    assert (status, text) == (0, one + one + two[len(one) :] * 2), notes
    file = tmp_path / "text.state"
    assert talk(place, "one", f"/save {file}", flags=flags)[0] == 0
    generated = talk(place, "two", flags=(*flags, "--state", str(file)))[1]
    assert generated == two[len(one) :]
    assert talk(place, "one", flags=(*flags, "--system", "be"))[1] == answers(server, "one", system="be")


def test_session_of_a_server_goes_on(talk: Talk, server: Server) -> None:
    _, first, notes = talk(server.url + "/v1/", "one")
    flag, session = notes.split()[-2:]
    assert flag == "--session"
    assert first + talk(server.url, "two", flags=(*GREEDY, flag, session))[1] == answers(server, "one", "two")


def test_an_answer_may_hold_what_python_takes_for_ends_of_lines(start: Start, run: Run, talk: Talk) -> None:
    text = "a\u2028b\u2029c\x85d"
    ids = text_codec(run.tokenizer).encode(text)
    server = start(Script(TorchEngine(run.model), ids))
    flags = ("--temperature", "0", "--max-new-tokens", str(len(ids)))
    assert talk(server.url, "one", flags=flags)[:2] == (0, text + "\n")


@pytest.mark.parametrize("place", ["server", "folder"])
@pytest.mark.parametrize("num_signals", [1, 2])
def test_ctrl_c_ends_an_answer_which_is_kept_unless_it_comes_twice(
    place: str, num_signals: int, start: Start, run: Run, talk: Talk, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine, opened = Watched(TorchEngine(run.model), seconds=0.01), chat.open_at_once

    @contextlib.contextmanager
    def open_watched(*names: Any) -> Iterator[tuple[Any, Any]]:
        with opened(*names) as (_, codec):
            yield engine, codec

    monkeypatch.setattr(chat, "open_at_once", open_watched)
    target, flags = (start(engine).url, ()) if place == "server" else (str(run.folder), ("--engine", "torch"))

    def interrupt() -> None:
        until(lambda: engine.num_read_tokens >= 60)
        if num_signals == 2:
            engine.before = lambda: time.sleep(3)  # so that the second one comes before the end
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    file = tmp_path / "text.state"
    lines = ("hello", f"/save {file}")
    status, text, notes = talk(
        target, *lines, flags=("--temperature", "0", "--no-stop-at-end", "--max-new-tokens", "4000", *flags)
    )
    thread.join()
    assert len(text) < 3000
    if num_signals == 1:
        assert status == 0, notes
        assert file.is_file()
    else:
        assert status == 2
        assert "this answer was dropped" in notes
        assert "the session has no turn" in notes


@pytest.mark.parametrize(
    ("lines", "flags", "message"),
    [
        (["/nope"], (), "/nope: unknown command"),
        (["/rewnd"], (), "did you mean '/rewind'"),
        (["/switch 2"], (), "the number of a branch, from 1 to 1"),
        (["/rewind"], (), "1 given, but the session has 0"),
        (["/save"], (), "/save: no file given"),
        (["/save /nowhere/x"], (), "/nowhere"),
        (["/save x.state"], (), "no turn"),
        (["\udcff"], (), "not UTF-8"),
        (["x" * (LONGEST + 1)], (), f"reads at most {LONGEST} (n_positions); /rewind N drops earlier answers"),
        (["hello"], ("--num-beams", "2"), "num_beams: 2 given"),
        (["hello"], ("--state", "/nowhere"), "--state"),
    ],
)
def test_mistakes_are_one_sentence(
    talk: Talk, target: tuple[str, tuple[str, ...]], lines: list[str], flags: tuple[str, ...], message: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    place, own = target
    status, text, notes = talk(place, *lines, flags=(*own[2 if "--num-beams" in flags else 0 :], *flags))
    assert (status, text) == (2, ""), notes
    assert message in notes
    assert len(notes.replace("\nmultilin: ", "").splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


class Terminal(io.RawIOBase):
    """Lines that are typed one after the other."""

    def __init__(self, *lines: bytes) -> None:
        self.lines = list(lines)

    def readable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        line = self.lines.pop(0) if self.lines else b""
        buffer[: len(line)] = line
        return len(line)


def test_what_is_typed_is_answered_in_a_file_without_the_signs_of_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], server: Server
) -> None:
    lines = io.BufferedReader(Terminal(b"hello\n", b"caf\xe9\n", b"/nope\n", b"more\n"))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(lines, "utf-8"))
    assert main(["chat", server.url, *GREEDY]) == 0
    text, notes = capsys.readouterr()
    assert text == answers(server, "hello", "more")
    assert notes.count("> ") == 5
    assert "stdin is not UTF-8: byte 0xe9\n" in notes


def test_servers_that_refuse_or_are_none(talk: Talk, start: Start, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    server: Any = start(keys=["secret"])
    cases = [
        (server.url, (), "api key"),
        (server.url, ("--api-key", "secret", "--session", "session_x"), "session_x"),
        (server.url, ("--api-key", "secret", "--session=session_-x"), "there is no session 'session_-x'"),
        (server.url, ("--api-key", "secret", "--session", ""), "--session: '' given"),
        (server.url, ("--api-key", "secret", "--session", "a/b"), "--session: 'a/b' given"),
        ("http://127.0.0.1:9", (), "does not answer"),
        ("http://a..b", (), "does not answer"),
        ("http://host:port", (), "is not the address of a server"),
        (server.url + "/health?", (), "POST is not allowed"),
        (str(run.folder), ("--session", "session_x"), "is not a server's address"),
        (str(run.folder / "nothing"), (), "nothing"),
    ]
    for place, flags, message in cases:
        status, _, notes = talk(place, "hello", flags=flags)
        assert status == 2, (place, flags)
        assert message in notes
    monkeypatch.setenv("MULTILIN_API_KEY", "secret")
    assert talk(server.url, "hello")[0] == 0
    monkeypatch.setenv("MULTILIN_API_KEY", "")
    assert "api key" in talk(server.url, "hello")[2]


def test_an_answer_that_breaks_off_ends_its_line(talk: Talk, start: Start, run: Run) -> None:
    engine = Watched(TorchEngine(run.model), seconds=0.05)
    server = start(engine)

    def fail() -> None:
        assert engine.num_read_tokens < 30

    engine.before = fail
    status, text, notes = talk(server.url, "hello")
    assert status == 2
    assert len(text) > 1
    assert text.endswith("\n")
    assert notes.startswith("multilin: server: ")


def test_settings_that_would_be_ignored_are_refused(talk: Talk, target: tuple[str, tuple[str, ...]]) -> None:
    status, _, notes = talk(target[0], "hello", flags=("--temperature", "0", "--seed", "5"))
    assert status == 2
    assert "seed: 5 given together with temperature: 0" in notes


def test_a_state_from_a_file_is_no_answer_to_drop(
    talk: Talk, target: tuple[str, tuple[str, ...]], tmp_path: Path
) -> None:
    place, flags = target
    file = tmp_path / "text.state"
    assert talk(place, "one", f"/save {file}", flags=flags)[0] == 0
    status, _, notes = talk(place, "/rewind", flags=(*flags, "--state", str(file)))
    assert status == 2
    assert "/rewind: 1 given, but 0 answers came after the state of --state" in notes
    again = talk(place, "two", "/rewind", "two", flags=(*flags, "--state", str(file)))[1]
    assert again == 2 * talk(place, "two", flags=(*flags, "--state", str(file)))[1]


def test_an_answer_that_memory_lost_is_not_silently_forgotten(
    run: Run, talk: Talk, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(chat, "ServeLimits", functools.partial(chat.ServeLimits, memory="1KB"))
    flags = (*GREEDY, "--engine", "torch")
    lost = {"three": "the last turn is no longer kept", f"/save {tmp_path / 'text.state'}": "is no longer kept"}
    for line, message in lost.items():
        status, text, notes = talk(str(run.folder), "one", "/fork", "two", "/switch 1", line, flags=flags)
        assert status == 2
        assert text.count("\n") == 2
        assert message in notes
