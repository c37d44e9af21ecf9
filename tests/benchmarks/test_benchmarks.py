"""Benchmarks are found by their files, explain themselves, give figures, and draw them."""

import gzip
import importlib
import json
import lzma
import os
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import benchmarks.__main__
from benchmarks import gpu, ops
from benchmarks.__main__ import main, names
from multilin.errors import InputError
from tests.processes import PYTHON, run

SIZES = ["--hidden-size", "16", "--num-layers", "2", "--num-heads", "2", "--vocab-size", "50"]
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("name", names())
def test_every_benchmark_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module(f"benchmarks.{name}").main(["--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert f"benchmarks {name}" in shown
    assert "--json" in shown


def test_an_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nothing"]) == 2
    assert "training_step" in capsys.readouterr().err


@pytest.mark.slow
def test_a_dry_run_for_gpus_checks_everything_and_times_nothing(tmp_path: Path) -> None:
    """As a user starts it: Triton does not interpret yet."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [*PYTHON, "-m", "benchmarks", "gpu", "--dry", "--json", str(tmp_path / "found.json")]
    shown = run(command, environment=environment)
    assert "nothing was timed" in shown
    found = json.loads((tmp_path / "found.json").read_text())
    assert not found["timed"]
    assert all(entry["passed"] for entry in found["checks"].values())
    assert all(
        "failed" not in entry
        for part in ("poolings", "matrices", "decoding", "training")
        for entry in found[part].values()
    )
    assert found["matrices"]["int8_linear to 64, 9 rows, 16"]["forward_ms"] is None


@pytest.mark.parametrize(
    ("found", "status"),
    [
        ({"checks": {"an op": {"passed": True}}, "limits": {"copy": 1.0}}, 0),
        ({"checks": {"an op": {"passed": False}}, "limits": {"copy": 1.0}}, 1),
        ({"checks": {"failed": "ImportError: no kernel"}, "limits": {"copy": 1.0}}, 1),
        ({"checks": {}, "limits": {"copy": 1.0}}, 1),
        ({"checks": {"an op": {"passed": True}}, "limits": {"failed": "RuntimeError: no memory"}}, 1),
    ],
)
def test_a_part_that_fails_as_a_whole_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, found: dict[str, Any], status: int
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(gpu, "_run", lambda arguments: found)
    assert gpu.main(["--dry", "--parts", "checks", "limits"]) == status


def test_without_a_card_nothing_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a card")
    assert main(["gpu"]) == 1
    assert "--dry" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["decode", "--json", str(tmp_path / "absent" / "found.json")]) == 1
    assert "--json: the folder" in capsys.readouterr().err


def test_a_training_step_is_timed_beside_its_peers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = ["--lengths", "32", "64", "--tokens", "64", "--turns", "1", "--models", "additive", "gpt2"]
    assert main(["training_step", "--save", str(tmp_path), *figures, *SIZES]) == 0
    assert "limit at 32" in capsys.readouterr().out
    ours, peer, *_ = _saved(tmp_path, "training_step")["rows"]
    assert (ours["model"], peer["model"]) == ("additive", "gpt2")
    assert 0 < ours["share_of_peak"] < 1
    assert ours["slowest"] <= ours["tokens_per_second"] <= ours["fastest"]
    # Additive attention has no products but those with weights; GPT-2's are more with pairs of positions.
    assert ours["share_of_peak_all_products"] == pytest.approx(ours["share_of_peak"], rel=0.01)
    assert peer["share_of_peak_all_products"] > 1.01 * peer["share_of_peak"]
    assert (tmp_path / "training_step.png").read_bytes().startswith(PNG)


def test_prefill_and_generation_are_timed_where_a_model_can(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["--positions", "16", "40", "--longest-peer", "16", "--batch-sizes", "1", "3"]
    turns = ["--turns", "1", "--prefill-turns", "1", "--tokens", "2", "--models", "additive", "gpt2"]
    assert main(["decode", "--save", str(tmp_path), *texts, *turns, *SIZES]) == 0
    assert "gpt2 is left out after 40 tokens" in capsys.readouterr().out
    rows = _saved(tmp_path, "decode")["rows"]
    prefills = [(row["model"], row["position"]) for row in rows if row["task"] == "prefill"]
    assert sorted(prefills) == [("additive", 16), ("additive", 40), ("gpt2", 16)]
    kept = {
        (row["model"], row["position"], row["batch_size"]): row["state_bytes"] for row in rows if "state_bytes" in row
    }
    assert kept["additive", 40, 1] == kept["additive", 16, 1]
    # Keys and values of two layers, sixteen tokens, sixteen float32 numbers; three texts have three times as many.
    assert kept["gpt2", 16, 3] == 3 * kept["gpt2", 16, 1] == 3 * 2 * 2 * 16 * 16 * 4


@pytest.mark.slow
def test_exported_models_are_timed_beside_those_in_pytorch(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    engines = ["--engines", "torch", "onnx", "onnx-8bit", "--exports", str(tmp_path / "exports")]
    turns = ["--turns", "1", "--prefill-turns", "1", "--tokens", "2", "--models", "additive", "gpt2"]
    texts = ["--positions", "16", "--batch-sizes", "1", "3"]
    assert main(["decode", "--save", str(tmp_path), *engines, *turns, *texts, *SIZES, "--hidden-size", "32"]) == 0
    kept = {
        (row["model"], row["batch_size"]): row["state_bytes"]
        for row in _saved(tmp_path, "decode")["rows"]
        if row["task"] == "generate" and row["position"]
    }
    assert {name for name, _ in kept} == {"additive", "additive: onnx", "additive: onnx-8bit", "gpt2", "gpt2: onnx"}
    for name in ("additive", "gpt2"):
        assert kept[name, 3] == kept[f"{name}: onnx", 3] == 3 * kept[f"{name}: onnx", 1]


@pytest.mark.slow
def test_a_server_is_loaded_and_gives_every_stream_its_own_text(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    pytest.importorskip("fastapi")
    few = ["--documents", "30", "--prompt-tokens", "8", "--tokens", "6", "--turns", "1", "--probes", "3"]
    many = ["--streams", "1", "5", "--sessions", "20", "--requests", "40", "--kept-turns", "5"]
    tasks = ["--models", "elita", "--tasks", "streams", "texts", "first-token", "sessions", "memory"]
    sizes = [*SIZES, "--vocab-size", "300", "--n-positions", "64"]
    assert main(["serve", "--save", str(tmp_path), *few, *many, *tasks, *sizes]) == 0
    rows = {row["task"]: row for row in _saved(tmp_path, "serve")["rows"]}
    assert rows["streams"]["streams"] == 5
    assert rows["streams"]["over_fewest_streams"] > 0
    assert (rows["texts"]["equal_greedy"], rows["texts"]["equal_seeded"]) == (3, 2)
    assert rows["first-token"]["p50_over_unloaded"] > 0
    assert rows["sessions"]["sessions"] == 20
    assert len(rows["memory"]["resident_bytes"]) == 10


def test_an_engine_that_is_not_installed_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["decode", "--engines", "ctranslate2-int8"]) == 1
    assert "pip install ctranslate2" in capsys.readouterr().err


def test_ops_are_timed_beside_their_limits(tmp_path: Path) -> None:
    assert main(["ops", "--save", str(tmp_path), "--shapes", "1,40,2,4", "--window", "8", "--turns", "1"]) == 0
    found = _saved(tmp_path, "ops")
    assert {"machine", "versions", "commit"} < set(found)
    assert {row["op"] for row in found["rows"]} == set(ops.OPS)
    limits = [row for row in found["rows"] if row["name"] == "limit"]
    assert all(row["forward_over_limit"] == row["backward_over_limit"] == 1 for row in limits)
    assert all(row["forward_ms"] > 0 and row["backward_ms"] > 0 for row in found["rows"])


def test_a_benchmark_that_fails_does_not_end_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(argv: list[str]) -> None:
        raise InputError("window: 0 given, but it must be positive")

    ran = []
    modules: dict[str, Any] = {
        "broken": SimpleNamespace(main=fail),
        "good": SimpleNamespace(main=ran.append),
        "long": SimpleNamespace(main=fail, BY_NAME_ONLY="it takes a day"),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, f"benchmarks.{name}", module)
    monkeypatch.setattr(benchmarks.__main__, "names", lambda: list(modules))
    assert main(["--save", str(tmp_path)]) == 1
    assert ran == [["--json", str(tmp_path / "good.json")]]
    assert _saved(tmp_path, "broken")["failure"] == "window: 0 given, but it must be positive"
    shown = capsys.readouterr()
    assert "broken failed: window: 0 given" in shown.err
    assert "it takes a day" in shown.out


def _saved(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    assert found["name"] == name
    return found


def test_what_needs_no_training_is_scored_on_the_final_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefgh", k=5)) for _ in range(60)]
    text = " ".join(draw.choices(words, k=20000))
    (tmp_path / "train.txt").write_text(text)
    noise = "".join(chr(draw.randrange(48, 112)) for _ in range(20000))
    for folder, final, other in (("easy", text[:20000], noise), ("hard", noise, text[:20000])):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "1.txt").write_text(final)
        (tmp_path / folder / "2.txt").write_text(other)
    found = {}
    for folder in ("easy", "hard"):
        files = ["--source", str(tmp_path / "train.txt"), "--validation", str(tmp_path / folder)]
        assert main(["references", "--save", str(tmp_path), *files, "--vocab-sizes", "300"]) == 0
        found[folder] = {row["row"]: row["bits_per_byte"] for row in _saved(tmp_path, "references")["rows"]}
    easy, hard = found["easy"], found["hard"]
    assert easy["gzip"] == pytest.approx(8 * len(gzip.compress(text[:20000].encode(), 9)) / 20000, rel=1e-2)
    assert easy["xz"] == pytest.approx(8 * len(lzma.compress(text[:20000].encode(), preset=9)) / 20000, rel=2e-2)
    assert easy["xz after the training text"] < 0.05 < 0.9 * easy["xz"]  # the very words stand there
    assert easy["gzip after the last 32 kB of training text"] < easy["gzip"]
    assert easy["5-gram, vocabulary 300"] < easy["3-gram, vocabulary 300"]
    assert all(5.9 < bits < 9 for name, bits in hard.items() if "gram" not in name)  # 64 symbols, at random
    assert all(easy[name] < hard[name] for name in easy)
