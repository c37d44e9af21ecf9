"""The verb export, and the engine that generate chooses."""

import importlib.util
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from multilin.cli.main import main
from multilin.export import cache

Call = Callable[..., str]
GREEDY = ("--prompt", "the cat", "--max-new-tokens", 20, "--temperature", 0)


@pytest.fixture(scope="module")
def run_with_cache(run_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of a run beside which its export may be kept."""
    folder = tmp_path_factory.mktemp("export") / "run"
    shutil.copytree(run_folder("additive"), folder)
    return folder


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU."""
    monkeypatch.setattr(cache.shutil, "which", lambda _: None)


@pytest.mark.slow
@pytest.mark.usefixtures("cpu")
def test_auto_exports_once_and_again_after_a_change(run_with_cache: Path, cli: Call, capsys) -> None:
    expected = cli("generate", run_with_cache, *GREEDY, "--engine", "torch")
    command = ["generate", str(run_with_cache), *map(str, GREEDY), "--engine", "auto"]
    for is_first in (True, False):
        assert main(command) == 0
        captured = capsys.readouterr()
        assert captured.out == expected
        assert ("exporting" in captured.err) == is_first
    assert cli("generate", cache.cache_folder(run_with_cache), *GREEDY, "--engine", "onnx") == expected
    # A state that one engine saved is continued by the other.
    state = run_with_cache.parent / "text.state"
    first = cli(
        "generate", run_with_cache, *GREEDY[:3], 8, "--temperature", 0, "--engine", "onnx", "--save-state", state
    )
    second = cli(
        "generate", run_with_cache, "--max-new-tokens", 12, "--temperature", 0, "--prompt", "", "--state", state
    )
    assert first + second == expected
    next(cache.cache_folder(run_with_cache).glob("weights*")).unlink()  # the export is made again
    assert main(command) == 0
    assert capsys.readouterr().out == expected
    config = json.loads((run_with_cache / "config.json").read_text())
    (run_with_cache / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    assert not cache.is_current(run_with_cache)


@pytest.mark.usefixtures("cpu")
def test_auto_falls_back_loudly(additive: Path, run_folder: Callable[[str], Path], capsys, monkeypatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxruntime" else find_spec(name))
    assert main(["generate", str(additive), *map(str, GREEDY)]) == 0
    assert "multilin: engine torch, as onnxruntime is not installed (pip install" in capsys.readouterr().err
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
    assert "engine onnx searches no beams" in refusal("generate", additive, "--num-beams", 2, "--engine", "onnx")
    assert "can be exported" in refusal("export", run_folder("gpt2"), "--output", tmp_path / "new")
    assert "--output" in refusal("export", additive, "--output", exported)
    assert "run: 'nowhere' is no folder" in refusal("export", "nowhere", "--output", tmp_path / "new")
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
        float, re.search(r"differ by (\S+) at most \(the largest is (\S+)\)", words).groups()
    )
    assert largest_difference < error * largest
