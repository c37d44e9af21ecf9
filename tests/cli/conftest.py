import io
import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from multilin.cli.main import main
from multilin.data.tokenizers import train_tokenizer
from multilin.model.factory import create_model
from multilin.runs.load import Run, load_run
from tests.letters import write_letters

WORDS = ("the", "a", "cat", "dog", "sat", "ran", "on", "under", "mat", "tree", "and", "saw", "big", "green", "house")
N_POSITIONS = 64

logging.disable_progress_bar()  # where a test is the first to ask for a folder, they would be part of its stderr


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """run_folder("gpt2"): a folder with an untrained model that writes lower-case letters and spaces only."""
    folders: dict[str, Path] = {}

    def make(architecture: str) -> Path:
        if architecture not in folders:
            folders[architecture] = tmp_path_factory.mktemp(Path(architecture).stem)
            _write_run(architecture, folders[architecture])
        return folders[architecture]

    return make


def _write_run(architecture: str, folder: Path) -> None:
    tokenizer = train_tokenizer([], "byte", None)
    torch.manual_seed(0)
    model: PreTrainedModel = create_model(
        architecture, hidden_size=16, num_layers=2, vocab_size=len(tokenizer), n_positions=N_POSITIONS,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    if architecture == "additive":
        write_letters(model, tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="session")
def trained(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run, trained through the command line."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder.parent / "cache"))
        status = main(
            [
                *("train", "--output", str(folder), "--data.source", str(text_file), "--tokenizer.kind", "byte"),
                *("--tokenizer.vocab_size", "null", "--model.architecture", "additive"),
                *("--model.hidden_size", "16", "--model.num_layers", "1"),
                *("--model.n_positions", "32", "--model.options.num_heads", "2", "--training.max_steps", "30"),
                *("--training.batch_size", "4", "--optimizer.learning_rate", "0.02", "--schedule.warmup_steps", "2"),
                *("--training.precision", "float32"),
            ]
        )
        assert status == 0
        yield folder


@pytest.fixture(autouse=True)
def nothing_piped_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stdin that ends at once."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))


@pytest.fixture
def additive(run_folder: Callable[[str], Path]) -> Path:
    """The folder of a model of ours."""
    return run_folder("additive")


@pytest.fixture(scope="session")
def loaded(run_folder: Callable[[str], Path]) -> Run:
    """The same model, loaded."""
    return load_run(run_folder("additive"))


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made-up sentences, in paragraphs."""
    draw = random.Random(0)
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n".join(" ".join(draw.choices(WORDS, k=40)) for _ in range(60)))
    return path


@pytest.fixture(autouse=True)
def background_exports(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The runs whose export was asked for in the background; none is started."""
    runs: list[Path] = []
    monkeypatch.setattr("multilin.export.cache.export_in_background", runs.append)
    return runs


def _with_engine(arguments: tuple[object, ...]) -> list[str]:
    """Text is generated in PyTorch where nothing else is said: exporting every run would take minutes."""
    words = [str(argument) for argument in arguments]
    is_plain = words[:1] == ["generate"] and "--engine" not in words
    return [*words, "--engine", "torch"] if is_plain else words


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """cli("info", folder) runs a verb that must succeed and returns its stdout."""

    def call(*arguments: object) -> str:
        status = main(_with_engine(arguments))
        captured = capsys.readouterr()
        assert status == 0, captured.err
        return captured.out

    return call


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """refusal("info", "x") runs what must be refused as bad input, with one sentence, which it returns."""

    def call(*arguments: object) -> str:
        status = main(_with_engine(arguments))
        captured = capsys.readouterr()
        assert status == 2, captured.err
        assert captured.out == ""
        assert captured.err.startswith("multilin: ")
        assert captured.err.count("\n") == 1
        return captured.err.removeprefix("multilin: ").strip()

    return call
