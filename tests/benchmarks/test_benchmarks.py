"""Benchmarks are found by their files, explain themselves, and give figures."""

import importlib
import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main, names


@pytest.mark.parametrize("name", names())
def test_every_benchmark_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module(f"benchmarks.{name}").main(["--help"])
    assert stopped.value.code == 0
    assert f"benchmarks {name}" in capsys.readouterr().out


def test_an_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nothing"]) == 2
    assert "training_step" in capsys.readouterr().err


@pytest.mark.slow
def test_a_training_step_is_timed_beside_its_peers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--hidden-size", "16", "--num-layers", "2", "--num-heads", "2", "--vocab-size", "50"]
    models = ["--models", "additive", "gpt2"]
    figures = ["--lengths", "32", "--tokens", "64", "--turns", "2", "--json", str(tmp_path / "found.json")]
    assert main(["training_step", *models, *sizes, *figures]) == 0
    assert "limit at 32" in capsys.readouterr().out
    ours, peer = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert (ours["model"], peer["model"]) == ("additive", "gpt2")
    assert 0 < ours["share_of_peak"] < 1
    assert ours["slowest"] <= ours["tokens_per_second"] <= ours["fastest"]
