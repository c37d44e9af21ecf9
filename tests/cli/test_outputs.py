"""Outputs that cannot be written: one sentence, an exit status, and nothing damaged or left half written."""

import errno
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from multilin.cli.info import DoctorArguments
from multilin.cli.main import BAD_INPUT, BROKEN_PIPE, FAILED, VERBS, main
from tests.processes import PYTHON, run, running

Call = Callable[..., str]

OUTPUTS: dict[str, list[str]] = {
    "evaluate": ["evaluate", "{run}", "--source", "{text}", "--output"],
    "generate": ["generate", "{run}", "--prompt", "the", "--max-new-tokens", "2", "--save-state"],
    "explain": ["explain", "{run}", "--text", "the", "--output"],
    "quantize": ["quantize", "{run}", "--source", "{text}", "--output"],
    "convert": ["convert", "fastformer", "{run}"],
    "tokenizer train": ["tokenizer", "train", "{text}"],
    "train": ["train", "--data.source", "{text}", "--output"],
    "compare": ["compare", "gpt2", "llama", "--data.source", "{text}", "--tokens", "1", "--output"],
}


def make_link_to_pipe(path: Path) -> None:
    os.mkfifo(path.with_name("pipe"))
    path.symlink_to("pipe")


TARGETS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "link to a pipe": make_link_to_pipe,
    "link to stdout": lambda path: path.symlink_to("/dev/stdout"),
    "link into the kernel": lambda path: path.symlink_to("/sys/output"),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("verb", OUTPUTS)
def test_no_verb_replaces_what_is_no_file(
    additive: Path, text_file: Path, tmp_path: Path, refusal: Call, verb: str, target: str
) -> None:
    path = tmp_path / "output"
    TARGETS[target](path)
    before = path.lstat()
    refusal(*[word.format(run=additive, text=text_file) for word in OUTPUTS[verb]], path)
    assert (path.lstat().st_ino, path.lstat().st_mode) == (before.st_ino, before.st_mode)
    assert {entry.name for entry in tmp_path.iterdir()} <= {"output", "pipe"}


def test_a_full_disk_is_one_sentence_and_leaves_the_old_file(
    additive: Path, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fill_up(path: Path, content: bytes) -> None:
        with path.open("wb") as file:
            file.write(content[:10])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    output = tmp_path / "scores.json"
    output.write_text("old")
    monkeypatch.setattr(Path, "write_bytes", fill_up)
    assert main(["evaluate", str(additive), "--source", str(text_file), "--output", str(output)]) == FAILED
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"multilin: {output}: No space left on device\n")
    assert output.read_text() == "old"
    assert main(["explain", str(additive), "--text", "the", "--output", str(tmp_path / "explained")]) == FAILED
    assert capsys.readouterr().err.endswith("explained/explain.html: No space left on device\n")
    assert [path.name for path in tmp_path.iterdir()] == ["scores.json"]


SHOWING = {
    "help": ["--help"],
    "info": ["info", "{run}"],
    "info as JSON": ["info", "{run}", "--json"],
    "doctor": ["doctor"],
    "evaluate": ["evaluate", "{run}", "--source", "{text}", "--output", "{output}"],
    "explain": ["explain", "{run}", "--text", "the", "--output", "{output}"],
    "generate": ["generate", "{run}", "--prompt", "the", "--max-new-tokens", "2", "--engine", "torch"],
    "tokenizer show": ["tokenizer", "show", "{run}", "--text", "the"],
}


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="no device that is always full")
@pytest.mark.parametrize("buffering", [-1, 1])
@pytest.mark.parametrize("verb", SHOWING)
def test_a_full_stdout_is_one_sentence(
    additive: Path,
    text_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    verb: str,
    buffering: int,
) -> None:
    output = tmp_path / "output"
    arguments = [word.format(run=additive, text=text_file, output=output) for word in SHOWING[verb]]
    with Path("/dev/full").open("w", buffering=buffering) as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        assert main(arguments) == FAILED
    assert capsys.readouterr().err == "multilin: stdout: No space left on device\n"
    if "{output}" in SHOWING[verb]:  # written first
        assert output.exists()


def test_a_closed_stdout_is_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", None)
        assert main(["--version"]) == FAILED
    assert capsys.readouterr().err == "multilin: stdout is closed; redirect it to a file, or to /dev/null\n"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # what takes its place is never closed
def test_messages_do_not_go_to_stdout_when_stderr_is_closed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", None)
        assert main(["trian"]) == BAD_INPUT
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "arguments",
    [["caf\udce9"], ["info", "caf\udce9"], ["train", "--caf\udce9"], ["tokenizer", "show", "x", "--text", "\udce9"]],
)
def test_arguments_that_are_not_utf8_are_refused(refusal: Call, arguments: list[str]) -> None:
    assert refusal(*arguments).endswith("\\udce9' holds bytes that are not UTF-8")


@pytest.mark.parametrize(
    ("raised", "status", "message"),
    [
        (OSError(errno.EROFS, "Read-only file system", "scores.json"), FAILED, "scores.json: Read-only file system"),
        (PermissionError(errno.EACCES, "Permission denied", "run"), FAILED, "run: Permission denied"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "xx"), BAD_INPUT, "xx: File name too long"),
        (OSError("no\nnumber"), FAILED, "no number"),
    ],
)
def test_what_the_system_refuses_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], raised: OSError, status: int, message: str
) -> None:
    def doctor(what: DoctorArguments) -> None:
        raise raised

    monkeypatch.setitem(VERBS, "doctor", doctor)
    assert main(["doctor"]) == status
    assert capsys.readouterr().err == f"multilin: {message}\n"


def test_a_table_whose_reader_stops_ends_like_any_other_output(monkeypatch: pytest.MonkeyPatch) -> None:
    def doctor(what: DoctorArguments) -> None:
        try:
            raise BrokenPipeError
        except BrokenPipeError:
            raise SystemExit(1)  # noqa: B904 - as rich does

    monkeypatch.setitem(VERBS, "doctor", doctor)
    assert main(["doctor"]) == BROKEN_PIPE


def test_a_tokenizer_does_not_replace_a_run(additive: Path, text_file: Path, refusal: Call) -> None:
    before = sorted(path.name for path in additive.iterdir())
    assert "exists already; give a new folder" in refusal("tokenizer", "train", text_file, additive, "--overwrite")
    assert sorted(path.name for path in additive.iterdir()) == before


ENDED = """
import sys
import time
from multilin.cli.main import VERBS, main
from multilin.files import atomic_folder

def doctor() -> None:
    with atomic_folder(OUTPUT) as partial:
        (partial / "begun").touch()
        time.sleep(600)

VERBS["doctor"] = doctor
sys.argv = ["multilin", "doctor"]
sys.exit(main())
"""


def test_a_command_that_is_ended_removes_what_it_has_half_written(tmp_path: Path) -> None:
    with running([*PYTHON, "-c", ENDED.replace("OUTPUT", repr(str(tmp_path / "output")))]) as program:
        while not list(tmp_path.glob(".output-*.partial/begun")):
            assert program.poll() is None
            time.sleep(0.01)
        program.terminate()
        assert program.wait(30) == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


LOST = """
import os
import signal
import sys
import time
from multilin.cli.main import VERBS, main

class Callback:
    def __del__(self) -> None:
        os.kill(os.getpid(), signal.NUMBER)
        time.sleep(0)

def doctor() -> None:
    Callback()
    print("went on", flush=True)
    time.sleep(60)

VERBS["doctor"] = doctor
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin without it
sys.argv = ["multilin", "doctor"]
sys.exit(main())
"""


@pytest.mark.parametrize(("name", "status"), [("SIGTERM", 128 + signal.SIGTERM), ("SIGINT", 130)])
def test_a_signal_inside_a_callback_that_may_not_raise_ends_a_command(name: str, status: int) -> None:
    """Python ignores exceptions of such callbacks, those of signals included."""
    assert "went on" in run([*PYTHON, "-c", LOST.replace("NUMBER", name)], status=status)
