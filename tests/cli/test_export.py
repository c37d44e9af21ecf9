"""The verb export, and the engine that generate chooses."""

import importlib.util
import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from multilin.cli.main import main
from multilin.errors import InputError
from multilin.export import cache
from multilin.files.lock import locked_folder
from multilin.inference.manifest import FORMAT
from multilin.runs.files import MANIFEST, source_hashes

Call = Callable[..., str]
GREEDY = ("--prompt", "the cat", "--max-new-tokens", 20, "--temperature", 0)


@pytest.fixture(scope="module")
def run_with_cache(run_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of a run beside which its export may be kept."""
    folder = tmp_path_factory.mktemp("export") / "run"
    shutil.copytree(run_folder("additive"), folder)
    return folder


@pytest.fixture
def run_copy(run_folder: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of a run that was not exported."""
    return Path(shutil.copytree(run_folder("additive"), tmp_path / "run"))


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU."""
    monkeypatch.setattr(cache.shutil, "which", lambda _: None)


START_IN_BACKGROUND = cache.export_in_background  # which tests replace
SAMPLED = ("--prompt", "the cat", "--max-new-tokens", 40, "--seed", 3)


@pytest.mark.slow
@pytest.mark.usefixtures("cpu")
def test_auto_exports_in_the_background_once(run_with_cache: Path, cli: Call, monkeypatch) -> None:
    """The text is the same before and after."""
    monkeypatch.setattr(cache, "export_in_background", START_IN_BACKGROUND)
    expected = [cli("generate", run_with_cache, *how, "--engine", "torch") for how in (GREEDY, SAMPLED)]
    assert [cli("generate", run_with_cache, *how, "--engine", "auto") for how in (GREEDY, SAMPLED)] == expected
    deadline = time.monotonic() + 500
    while not cache.is_current(run_with_cache) and time.monotonic() < deadline:
        time.sleep(0.2)
    monkeypatch.setattr("multilin.runs.load.load_run", None)  # the run itself is not loaded any more
    assert [cli("generate", run_with_cache, *how, "--engine", "auto") for how in (GREEDY, SAMPLED)] == expected
    monkeypatch.undo()
    assert cli("generate", cache.cache_folder(run_with_cache), *GREEDY, "--engine", "onnx") == expected[0]
    # A state that one engine saved is continued by the other.
    state = run_with_cache.parent / "text.state"
    first = cli(
        "generate", run_with_cache, *GREEDY[:3], 8, "--temperature", 0, "--engine", "onnx", "--save-state", state
    )
    second = cli(
        "generate", run_with_cache, "--max-new-tokens", 12, "--temperature", 0, "--prompt", "", "--state", state
    )
    assert first + second == expected[0]


@pytest.mark.usefixtures("cpu")
def test_auto_does_not_wait_for_an_export(
    run_copy: Path, cli: Call, capsys: pytest.CaptureFixture[str], background_exports: list[Path]
) -> None:
    expected = cli("generate", run_copy, *GREEDY, "--engine", "torch")
    assert background_exports == []  # nobody asked for one
    assert cli("generate", run_copy, *GREEDY, "--engine", "auto") == expected
    assert background_exports == [run_copy]
    folder = cache.cache_folder(run_copy)
    assert not folder.exists()
    folder.mkdir(parents=True)  # an export that lacks its graphs
    kept = {"format": FORMAT, "source": source_hashes(run_copy), "files": {}}
    (folder / MANIFEST).write_text(json.dumps(kept))
    assert cli("generate", run_copy, *GREEDY, "--engine", "auto") == expected
    assert background_exports == [run_copy] * 2
    assert not folder.exists()


@pytest.mark.usefixtures("cpu")
def test_one_export_in_the_background_is_enough(
    run_copy: Path, capsys: pytest.CaptureFixture[str], background_exports: list[Path]
) -> None:
    with locked_folder("export", cache.cache_folder(run_copy).parent):  # as the process that exports holds it
        assert main(["generate", str(run_copy), *map(str, GREEDY)]) == 0
    assert "multilin: still exporting" in capsys.readouterr().err
    assert background_exports == []


@pytest.mark.usefixtures("cpu")
def test_a_run_that_trained_for_long_is_exported_at_its_end(
    tmp_path: Path, cli: Call, text_file: Path, background_exports: list[Path], monkeypatch
) -> None:
    sizes = ["--model.hidden_size", 32, "--model.num_layers", 1, "--model.n_positions", 32, "--training.max_steps", 1]
    text = ["--data.source", text_file, "--tokenizer.kind", "byte", "--output", tmp_path / "run"]
    command = ["train", *text, *sizes]
    cli(*command)
    assert background_exports == []
    monkeypatch.setattr("multilin.cli.export.EXPORT_SECONDS", 0.0)
    cli(*command, "--overwrite")
    assert background_exports == [tmp_path / "run"]


@pytest.mark.usefixtures("cpu")
def test_an_export_that_failed_is_not_tried_again(
    run_copy: Path, capsys: pytest.CaptureFixture[str], background_exports: list[Path], monkeypatch
) -> None:
    command = ["generate", str(run_copy), *map(str, GREEDY)]

    def fail(*_: object, **__: object) -> None:
        raise InputError("run: the logits differ")

    monkeypatch.setattr("multilin.export.folder.export_run", fail)
    with pytest.raises(InputError, match="the logits differ"):
        cache.keep_export(run_copy)
    assert not cache.is_current(run_copy)
    assert main(command) == 0
    assert "multilin: using the engine torch, because the logits differ" in capsys.readouterr().err
    assert background_exports == []
    assert main([*command, "--engine", "onnx"]) == 2
    assert "multilin: run: the logits differ" in capsys.readouterr().err
    config = json.loads((run_copy / "config.json").read_text())
    (run_copy / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    assert main(command) == 0
    assert background_exports == [run_copy]


def test_the_export_of_a_run_that_changes_meanwhile_is_not_used(run_copy: Path, monkeypatch) -> None:
    def export_run(_: object, folder: Path, *, source: dict[str, str], **__: object) -> None:
        (run_copy / "config.json").write_text((run_copy / "config.json").read_text() + " ")
        folder.mkdir(parents=True)
        (folder / MANIFEST).write_text(json.dumps({"format": FORMAT, "source": source, "files": {}}))

    monkeypatch.setattr("multilin.export.folder.export_run", export_run)
    cache.keep_export(run_copy)
    assert not cache.is_current(run_copy)


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("fields", [{"dtype": "bfloat16"}, {"arithmetic": {"products": "int8"}}], ids=str)
def test_models_that_graphs_do_not_compute_alike_run_in_torch(run_copy: Path, fields: dict[str, object]) -> None:
    """The same seed gives the same text, whether or not there is an export."""
    assert cache.why_torch(run_copy) is None
    config = json.loads((run_copy / "config.json").read_text())
    (run_copy / "config.json").write_text(json.dumps(config | fields))
    assert "graphs compute in float32" in str(cache.why_torch(run_copy))


@pytest.mark.usefixtures("cpu")
def test_auto_falls_back_loudly(additive: Path, run_folder: Callable[[str], Path], capsys, monkeypatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxruntime" else find_spec(name))
    assert main(["generate", str(additive), *map(str, GREEDY)]) == 0
    assert "the engine torch, because onnxruntime is not installed (pip install" in capsys.readouterr().err
    assert main(["generate", str(run_folder("gpt2")), *map(str, GREEDY)]) == 0
    assert "engine torch" not in capsys.readouterr().err  # there is no other


def test_engines_that_cannot_be_are_refused(
    additive: Path, run_folder: Callable[[str], Path], refusal: Call, tmp_path: Path, monkeypatch
) -> None:
    exported = tmp_path / "export"
    exported.mkdir()
    (exported / "multilin.json").write_text("{}")
    assert "engine: torch given" in refusal("generate", exported, "--prompt", "x", "--engine", "torch")
    assert "has format None" in refusal("generate", exported, "--prompt", "x", "--engine", "onnx")
    assert "only the engine torch has" in refusal("generate", additive, "--num-beams", 2, "--engine", "onnx")
    assert "can be exported" in refusal("export", run_folder("gpt2"), "--output", tmp_path / "new")
    assert "--output" in refusal("export", additive, "--output", exported)
    assert "run: there is no folder 'nowhere'" in refusal("export", "nowhere", "--output", tmp_path / "new")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "needs onnxruntime" in refusal("generate", additive, "--prompt", "x", "--engine", "onnx")
    assert "export: needs onnx, which is not installed" in refusal("export", additive, "--output", tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "error"), [("float32", 1e-5), ("8bit", 0.02), ("4bit", 0.2)])
def test_export_prints_a_comparison(trained: Path, cli: Call, tmp_path: Path, precision: str, error: float) -> None:
    words = " ".join(cli("export", trained, "--output", tmp_path / "out", "--precision", precision).split())
    assert "bits per byte" in words
    assert f"ONNX, {precision}" in words
    equal, compared = re.search(r"(\d+) of (\d+) greedy tokens are equal", words).groups()
    assert 0 < int(compared) <= 200
    assert precision != "float32" or equal == compared
    largest_difference, largest = map(
        float, re.search(r"differ by at most (\S+) \(the largest logit is (\S+)\)", words).groups()
    )
    assert largest_difference < error * largest
