import ctypes
import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

import multilin
from multilin.analysis import machine
from multilin.cli.info import DoctorArguments
from multilin.cli.main import BROKEN_PIPE, FIRST_SECONDS, VERBS, main
from multilin.cli.messages import say_next
from multilin.training.outcomes import TrainingFailed, TrainingInterrupted

Call = Callable[..., str]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "'trian' is not a verb of multilin; did you mean 'train'?"),
        (["tokenizer"], "tokenizer: nothing given, but it should be train or show"),
        (["tokenizer", "shwo"], "tokenizer: 'shwo' given, but it should be train or show"),
        (["generate"], "RUN: missing; `multilin generate --help` shows the arguments"),
        (["doctor", "now"], "now: unknown argument; `multilin doctor --help` lists the arguments"),
        (["train", "--model.hiden_size", "8"], "--model.hiden_size: unknown flag; did you mean '--model.hidden_size'?"),
        (["train", "--model.hidden_size", "big"], "--model.hidden_size: 'big' given, but it should be an integer"),
        (["train", "--model.hidden_size"], "--model.hidden_size: a value is missing; give an integer"),
        (["generate", "x", "--prompt", "-5"], "run: there is no folder 'x'"),
        (["generate", "x", "--prompt", "-a"], "--prompt: a value is missing; give a text; write --prompt=... if"),
        (["train", "--training.compile", "maybe"], "--training.compile: 'maybe' given, but it should be true or false"),
        (["train", "--schedule.name", "line"], "--schedule.name: 'line' given, but it should be linear or cosine"),
        (["train", "--optimizer.betas", "0.9"], "--optimizer.betas: '0.9' given, but it should be a list such as [0.9"),
        (["generate", "x", "--stop", "[1]"], "--stop: '[1]' given, but it should be a text, or a list such as"),
        (["train", "--training.max_steps", "0"], "training.max_steps: 0 given, but it should be at least 1"),
        (["train", "--model.options.num_haeds", "2"], "model.options.num_haeds: unknown field; did you mean"),
        (["train", "demoo"], "recipe: 'demoo' is neither a YAML file, the folder of a run, nor a built-in recipe"),
        (["train", "--data.mix", "[1]"], "--data.mix: '[1]' given, but it should be a JSON object that maps names to"),
        (["compare", "--task", "mqar", "--task", "copy"], "--task: 'mqar' and 'copy' given, but --task takes one"),
        (["train", "--model.options.window", "4", "--model.options.window=8"], "--model.options.window: 4 and 8 given"),
        (["convert", "fastfomer", "a", "b"], "KIND: 'fastfomer' given, but it should be fastformer or leap"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence(refusal: Call, arguments: list[str], message: str) -> None:
    assert refusal(*arguments).startswith(message)


@pytest.mark.parametrize("words", [["train"], ["plan"], ["train", "--minutes", "1"], ["compare"], ["compare", "gpt2"]])
def test_text_is_not_taken_for_a_recipe(
    words: list[str], refusal: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my-books").mkdir()
    Path("book.txt").write_text("Title: A Book")
    assert refusal(*words, "my-books/").endswith("; text is given as --data.source my-books/")
    assert refusal(*words, "book.txt").endswith("; text is given as --data.source book.txt")
    if "compare" not in words:
        several = "give text with --data.source: one file, folder or quoted glob"
        assert refusal(*words, "book.txt", "book.txt") == f"book.txt: unknown argument; {several}"


@pytest.mark.parametrize(
    ("raised", "status", "message"),
    [
        (KeyboardInterrupt(), 130, "multilin: interrupted\n"),
        (TrainingInterrupted("stopped after step 3", 15), 143, "multilin: stopped after step 3\n"),
        (TrainingInterrupted("stopped after step 3", 2), 130, "multilin: stopped after step 3\n"),
        (TrainingFailed("the loss of step 3 is nan"), 1, "multilin: the loss of step 3 is nan\n"),
    ],
)
def test_every_end_has_its_exit_status(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    raised: BaseException,
    status: int,
    message: str,
) -> None:
    def doctor(arguments: DoctorArguments) -> None:
        raise raised

    monkeypatch.setitem(VERBS, "doctor", doctor)
    assert main(["doctor"]) == status
    assert capsys.readouterr().err == message


def test_bad_input_is_named_by_the_first_process_of_a_machine_before_the_others(
    monkeypatch: pytest.MonkeyPatch, refusal: Call
) -> None:
    waits: list[float] = []
    monkeypatch.setattr("time.sleep", waits.append)
    for local_rank, expected in (("0", []), ("1", [FIRST_SECONDS])):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        assert refusal("trian").startswith("'trian' is not a verb")
        assert waits == expected


def test_a_warning_is_one_line_on_stderr(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def doctor(arguments: DoctorArguments) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("this will be slow", stacklevel=2)

    monkeypatch.setitem(VERBS, "doctor", doctor)
    assert main(["doctor"]) == 0
    assert capsys.readouterr().err == "multilin: warning: this will be slow\n"


def test_the_version(cli: Call) -> None:
    assert cli("--version") == f"multilin {multilin.__version__}\n"


@pytest.mark.skipif(sys.platform == "win32", reason="no pipes that break")
def test_the_module_runs_as_a_program_whose_reader_may_stop() -> None:
    """`python -m multilin --help | head -0`, with the pipe closed before anything is written."""
    arguments = [sys.executable, "-m", "multilin", "--help"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == BROKEN_PIPE


def test_the_allocator_can_be_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("mallopt was reached")

    monkeypatch.setenv(machine.VARIABLE, "system")
    monkeypatch.setattr(ctypes, "CDLL", refuse)
    machine.keep_freed_memory()
    assert machine.why_not() == "MULTILIN_ALLOCATOR=system is set"


def test_doctor_reports_every_op(cli: Call) -> None:
    from multilin.ops.dispatch import all_ops

    found = json.loads(cli("doctor", "--json"))
    assert found["backends"].keys() == all_ops().keys()
    assert found["versions"]["multilin"] == multilin.__version__
    shown = cli("doctor")
    assert all(f"op {name}" in shown for name in all_ops())


def test_doctor_warns_about_a_slow_op(monkeypatch: pytest.MonkeyPatch, cli: Call) -> None:
    from multilin.analysis import machine
    from multilin.ops.dispatch import Backend, Op

    fast = Backend("fast", lambda: None, why_not=lambda: "numba is not installed")
    slow = Backend("reference", lambda: None)
    monkeypatch.setattr(machine, "all_ops", lambda: {"some_op": Op("some_op", [fast, slow])})
    expected = "some_op uses its slow implementation, reference (fast: numba is not installed)"
    assert expected in json.loads(cli("doctor", "--json"))["warnings"]
    assert expected in cli("doctor")


def test_commands_to_type_next_can_be_typed(capsys: pytest.CaptureFixture[str]) -> None:
    say_next(["less", Path("runs/my book/README.md")], ["hf", "upload", "me/model", "it's"])
    assert capsys.readouterr().err.splitlines()[2:] == [
        "  less 'runs/my book/README.md'",
        """  hf upload me/model 'it'"'"'s'""",
    ]
