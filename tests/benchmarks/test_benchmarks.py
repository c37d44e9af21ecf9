"""Benchmarks are found by their files, explain themselves, and give figures."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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


def test_a_dry_run_for_gpus_checks_everything_and_times_nothing(tmp_path: Path) -> None:
    """In a process of its own, since Triton decides once whether it interprets."""
    pytest.importorskip("triton")
    program = [sys.executable, "-m", "benchmarks", "gpu", "--dry", "--json", str(tmp_path / "found.json")]
    done = subprocess.run(program, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing was timed" in done.stdout
    found = json.loads((tmp_path / "found.json").read_text())
    assert not found["timed"]
    assert all(entry["passed"] for entry in found["checks"].values())
    assert all(
        "failed" not in entry
        for part in ("poolings", "matrices", "decoding", "training")
        for entry in found[part].values()
    )
    assert found["matrices"]["int8_linear, 9 x 16 x 64"]["forward_ms"] is None


def test_without_a_card_nothing_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a card")
    assert main(["gpu"]) == 2
    assert "--dry" in capsys.readouterr().err


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
