"""Every verb on runs with layers from a user's file: without a state, with a fixed one, and with one that grows."""

import io
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from multilin.architectures import own_file
from multilin.cli.main import main
from multilin.files import trust
from multilin.training import loop
from tests.architectures.test_own_file import LAYERS
from tests.processes import PYTHON, run, running, torchrun

FORMS = ("Attention", "Loop", "Cached")  # no state, a state of fixed size, a growing one
RANDOM_TEXT = torch.randint(97, 122, (6000,), generator=torch.Generator().manual_seed(0)).tolist()
pytestmark = [
    pytest.mark.filterwarnings("ignore:layer Attention has no state"),
    pytest.mark.filterwarnings("ignore:.*reads? across document borders"),
    pytest.mark.filterwarnings("ignore:.*has changed since this model was made"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with layers.py, a text, and folders for settings and prepared text."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "layers.py").write_text(LAYERS)
    (folder / "text.txt").write_bytes(bytes(RANDOM_TEXT))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setattr("multilin.training.loop.draw_loss", lambda lines, path: path.touch())
        yield folder
    torch.set_num_threads(threads)


def words(place: Path, architecture: str, output: str, **changes: object) -> list[str]:
    """The command line of a short training."""
    fields: dict[str, object] = {
        "output": place / output, "data.source": place / "text.txt", "tokenizer.kind": "byte",
        "model.architecture": architecture, "model.hidden_size": 16, "model.num_layers": 1, "model.n_positions": 32,
        "training.max_steps": 6, "training.batch_size": 2, "training.save_every_steps": 2,
        "training.precision": "float32", "schedule.warmup_steps": 2, **changes,
    }  # fmt: skip
    return ["train", *(str(word) for name, value in fields.items() for word in (f"--{name}", value))]


@pytest.fixture(scope="module")
def runs(place: Path) -> Path:
    """A folder with a run for each form."""
    for form in FORMS:
        assert main(words(place, f"{place}/layers.py:{form}", form)) == 0
    return place


@pytest.fixture(autouse=True)
def nothing_piped_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """call("info", folder) runs a verb that must succeed and returns its stdout."""

    def run_verb(*arguments: object) -> str:
        capsys.readouterr()
        status = main([str(word) for word in arguments])
        captured = capsys.readouterr()
        assert status == 0, captured.err
        return captured.out

    return run_verb


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process be one that has loaded no users' files."""
    monkeypatch.setattr(own_file, "_sources", {})
    for module in [module for module in sys.modules if module.startswith("multilin_own_")]:
        monkeypatch.delitem(sys.modules, module)


@pytest.mark.parametrize("form", FORMS)
def test_generate_goes_on_from_a_state(runs: Path, form: str, call: Callable[..., str], tmp_path: Path) -> None:
    greedy = ("--temperature", 0, "--engine", "torch")
    whole = call("generate", runs / form, "--prompt", "abc", "--max-new-tokens", 10, *greedy)
    first = call("generate", runs / form, "--prompt", "abc", "--max-new-tokens", 4, "--save-state", tmp_path / "s",
                 *greedy)  # fmt: skip
    rest = call("generate", runs / form, "--state", tmp_path / "s", "--max-new-tokens", 6, "--no-echo", *greedy)
    assert whole.rstrip("\n") == (first.rstrip("\n") + rest.rstrip("\n"))


@pytest.mark.parametrize("form", FORMS)
def test_info_evaluate_explain_and_quantize(runs: Path, form: str, call: Callable[..., str], tmp_path: Path) -> None:
    assert f"layers.py:{form}@" in call("info", runs / form)
    assert "bits per byte" in call("evaluate", runs / form)
    call("explain", runs / form, "--text", "abcd", "--output", tmp_path / "explain")
    explained = json.loads((tmp_path / "explain" / "explain.json").read_text())
    assert "removal" in json.dumps(explained)
    call("quantize", runs / form, "--output", tmp_path / "int8")
    call("generate", tmp_path / "int8", "--prompt", "abc", "--max-new-tokens", 2, "--engine", "torch")


@pytest.mark.parametrize("form", ["Attention", "Cached"])
def test_a_state_that_grows_is_not_exported(runs: Path, form: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(runs / form), "--output", str(runs / "onnx")]) == 2
    assert "the state of this model grows with the text" in capsys.readouterr().err
    assert not (runs / "onnx").exists()


def test_what_cannot_be_traced_is_one_sentence(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (place / "odd.py").write_text(LAYERS.replace("mean = decay * mean", "mean = decay * float(mean.sum() > 0)"))
    assert main(words(place, f"{place}/odd.py:Loop", "odd")) == 0
    capfd.readouterr()
    assert main(["export", str(place / "odd"), "--output", str(place / "onnx")]) == 2
    said = capfd.readouterr().err.strip().splitlines()
    assert re.match(r"multilin: run: this model cannot be exported as a graph", said[-1])
    assert len(said) == 1


@pytest.mark.slow
def test_a_fixed_state_is_exported(runs: Path, call: Callable[..., str], tmp_path: Path) -> None:
    call("export", runs / "Loop", "--output", tmp_path / "onnx")
    greedy = ("--prompt", "abc", "--max-new-tokens", 10, "--temperature", 0)
    assert call("generate", tmp_path / "onnx", *greedy) == call("generate", runs / "Loop", *greedy, "--engine", "torch")


@pytest.mark.parametrize("form", FORMS)
def test_a_stopped_run_resumes_bit_for_bit_with_its_own_copy(
    runs: Path, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "layers.py").write_text(LAYERS)
    given, set_rates = words(runs, f"{tmp_path}/layers.py:{form}", str(tmp_path / "stopped")), loop._set_rates

    def stop(run: Any) -> float:
        if run.step == 3:
            signal.raise_signal(signal.SIGTERM)
        return set_rates(run)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "_set_rates", stop)
        assert main(given) != 0
    assert not (tmp_path / "stopped" / "model.safetensors").exists()
    (tmp_path / "layers.py").write_text("raise RuntimeError('changed')\n")
    forget(monkeypatch)
    assert main(["train", str(tmp_path / "stopped"), "--resume"]) == 0
    weights, others = (load_file(folder / "model.safetensors") for folder in (tmp_path / "stopped", runs / form))
    assert all(torch.equal(weights[name], others[name]) for name in others)


@pytest.mark.parametrize("form", FORMS)
def test_adapters_are_trained_and_merged(runs: Path, form: str, call: Callable[..., str], tmp_path: Path) -> None:
    call("train", "--model.start", runs / form, "--output", tmp_path / "lora", "--data.source", runs / "text.txt",
         "--training.max_steps", 3, "--training.lora.rank", 2, "--schedule.warmup_steps", 1,
         "--training.batch_size", 2, "--training.precision", "float32")  # fmt: skip
    call("merge", tmp_path / "lora", "--output", tmp_path / "merged")
    greedy = ("--prompt", "abc", "--max-new-tokens", 5, "--temperature", 0, "--engine", "torch")
    assert call("generate", tmp_path / "lora", *greedy) == call("generate", tmp_path / "merged", *greedy)
    weights = load_file(tmp_path / "merged" / "model.safetensors"), load_file(runs / form / "model.safetensors")
    changed = {name for name in weights[1] if not torch.equal(weights[0][name], weights[1][name])}
    assert any(".module." in name for name in changed)


def test_a_moved_run_needs_no_original(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(runs / "Loop", tmp_path / "moved")
    forget(monkeypatch)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "moved").config.layers[0]["decay"] == 0.9


def test_no_verb_runs_the_code_of_a_foreign_folder(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    witness = tmp_path / "was-run"
    (tmp_path / "foreign.py").write_text(f"{LAYERS}\nopen({str(witness)!r}, 'w').close()\n")
    assert main(words(place, f"{tmp_path}/foreign.py:Loop", "foreign")) == 0
    witness.unlink()
    folder = str(place / "foreign")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "another"))
    forget(monkeypatch)
    monkeypatch.setattr(trust, "_trusted", set())
    out = ("--output", str(tmp_path / "out"))
    for verb in (
        ["info", folder], ["generate", folder, "--prompt", "a"], ["evaluate", folder], ["quantize", folder, *out],
        ["explain", folder, "--text", "ab", *out], ["export", folder, *out], ["chat", folder], ["serve", folder],
        ["publish", folder, "me/mine", "--folder", out[1]], ["train", folder, "--resume"],
        ["train", "--model.start", folder, *out], ["compare", folder, "gpt2", *out],
    ):  # fmt: skip
        assert main(verb) == 2, verb
        assert "is code that you have not run before; read it" in capsys.readouterr().err, verb
        assert not witness.exists(), verb
    assert main(["doctor"]) == 0
    assert not witness.exists()


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_two_processes_train_together(runs: Path, form: str, tmp_path: Path) -> None:
    given = words(runs, f"{runs}/layers.py:{form}", str(tmp_path / "two"), **{"training.batch_size": 1})
    run(torchrun(2, "-m", "multilin", *given), environment={**os.environ, "OMP_NUM_THREADS": "1"})
    weights, others = (load_file(folder / "model.safetensors") for folder in (tmp_path / "two", runs / form))
    for name, weight in others.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-3, atol=2e-5)


@pytest.mark.slow
def test_two_versions_of_a_file_train_at_once(place: Path, tmp_path: Path) -> None:
    commands = []
    for depth in (1, 2):
        folder = tmp_path / str(depth)
        folder.mkdir()
        (folder / "layers.py").write_text(LAYERS.replace("depth=2", f"depth={depth}"))
        commands.append([*PYTHON, "-m", "multilin", *words(place, f"{folder}/layers.py:Gru", str(folder / "run"))])
    with running(commands[0]) as first, running(commands[1]) as second:
        assert (first.wait(120), second.wait(120)) == (0, 0)
    for depth in (1, 2):
        (tmp_path / str(depth) / "layers.py").unlink()
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / str(depth) / "run")
        assert loaded.model.layers[0].attention.module.gru.num_layers == depth
