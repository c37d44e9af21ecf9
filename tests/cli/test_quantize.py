"""multilin quantize: a smaller folder beside the run, that evaluate and generate run from."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from multilin.runs.load import load_run

Call = Callable[..., str]


@pytest.fixture
def copy(additive: Path, tmp_path: Path) -> Path:
    """A run of its own."""
    return Path(shutil.copytree(additive, tmp_path / "run"))


def test_the_copy_is_smaller_and_scores_as_printed(copy: Path, cli: Call, text_file: Path) -> None:
    shown = cli("quantize", copy, "--source", text_file)
    int8 = copy.with_name("run-int8")
    rows = {line[:22].strip(): line[22:].split() for line in shown.splitlines()[1:]}
    found = [json.loads(cli("evaluate", folder, "--json", "--source", text_file))["loss"] for folder in (copy, int8)]
    assert [float(cell) for cell in rows["loss, nats per token"][:2]] == pytest.approx(found, abs=1e-4)
    assert found[1] == pytest.approx(found[0], rel=0.05)
    tensors = load_file(int8 / "model.safetensors")
    assert {tensor.dtype for name, tensor in tensors.items() if name.endswith("_int8")} == {torch.int8}
    size = [sum(path.stat().st_size for path in folder.glob("*.safetensors")) for folder in (copy, int8)]
    assert size[1] < 0.7 * size[0]


def test_text_is_written_from_the_copy_and_its_states(copy: Path, cli: Call, text_file: Path, tmp_path: Path) -> None:
    cli("quantize", copy, "--output", tmp_path / "small", "--source", text_file)
    words = ("generate", tmp_path / "small", "--seed", 1, "--max-new-tokens")
    whole = cli(*words, 12, "--prompt", "a cat")
    first = cli(*words, 5, "--prompt", "a cat", "--save-state", tmp_path / "s.state")
    assert whole.startswith(first)
    before, after = (json.loads(cli("info", folder, "--json")) for folder in (copy, tmp_path / "small"))
    assert (after["parameters"], after["flops_per_token"]) == (before["parameters"], before["flops_per_token"])
    assert "int8" not in load_run(copy).model.config.arithmetic


def test_what_cannot_be_rounded_is_refused(
    copy: Path,
    cli: Call,
    refusal: Call,
    text_file: Path,
    run_folder: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gpt2 = run_folder("gpt2")
    capsys.readouterr()  # a progress bar, where it was just written
    assert "source: none given" in refusal("quantize", copy)
    assert not copy.with_name("run-int8").exists()
    assert "GPT2LMHeadModel" in refusal("quantize", gpt2, "--output", tmp_path / "x")
    cli("quantize", copy, "--source", text_file)
    int8 = copy.with_name("run-int8")
    assert f"{int8} exists already" in refusal("quantize", copy, "--source", text_file)
    assert "int8 already" in refusal("quantize", int8, "--source", text_file)
    assert "no run to resume" in refusal("train", "--output", int8, "--resume")
