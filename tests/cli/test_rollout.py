import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from multilin.data.tokenizers import train_tokenizer
from multilin.model.factory import create_model
from tests.cli.conftest import N_POSITIONS

Call = Callable[..., str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained linear mixer, all of it linear."""
    folder, tokenizer = tmp_path_factory.mktemp("linear"), train_tokenizer([], "byte", None)
    torch.manual_seed(0)
    create_model(
        "linear_mixer", hidden_size=16, num_layers=2, vocab_size=len(tokenizer), n_positions=N_POSITIONS,
        options={"mixing_bias": True, "feed_forward": "linear"}, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    ).save_pretrained(folder)  # fmt: skip
    tokenizer.save_pretrained(folder)
    return folder


def test_both_ways_give_the_same_text(folder: Path, cli: Call) -> None:
    found = json.loads(cli("rollout", folder, "--prompt", "the cat", "--num-steps", 30, "--json"))
    assert found["num_prompt_tokens"] == 8
    assert len(found["parallel"]["token_ids"]) == 30
    assert found["parallel"]["text"] == found["sequential"]["text"]
    assert found["largest_difference"] <= 1e-10
    assert found["speedup"] == pytest.approx(found["sequential"]["seconds"] / found["parallel"]["seconds"])
    less_exact = json.loads(
        cli("rollout", folder, "--prompt", "the cat", "--num-steps", 30, "--json", "--dtype", "float32")
    )
    assert 1e-10 < less_exact["largest_difference"] <= 1e-4


def test_outputs_that_overflow_are_refused(folder: Path, refusal: Call, tmp_path: Path) -> None:
    large = shutil.copytree(folder, tmp_path / "large")
    config = json.loads((large / "config.json").read_text())
    (large / "config.json").write_text(json.dumps(config | {"final_scale": 300.0}))
    message = refusal("rollout", large, "--prompt", "x", "--num-steps", 60, "--dtype", "float32")
    words = r"exceed the range of float32 after \d\d steps; give fewer steps or --dtype float64"
    assert re.fullmatch(rf"num_steps: 60 given, but the outputs {words}", message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", ""], "prompt: none given, but a rollout continues a text; give --prompt"),
        ([], "prompt: none given, but a rollout continues a text; give --prompt"),
        (["--prompt", "x" * N_POSITIONS], "prompt: the text has 65 tokens, but this model reads at most 64"),
        (["--prompt", "x", "--num-steps", "64"], "num_steps: 64 given after a text of 2 tokens, but this model reads"),
        (["--prompt", "x", "--num-steps", "0"], "--num-steps: 0 given, but it should be at least 1"),
        (["--prompt", "x", "--dtype", "int8"], "--dtype: 'int8' given, but it should be float64 or float32"),
    ],
)
def test_bad_requests_are_refused(folder: Path, refusal: Call, arguments: list[str], message: str) -> None:
    assert refusal("rollout", folder, *arguments).startswith(message)


def test_models_that_are_not_linear_are_refused(
    additive: Path, run_folder: Callable[[str], Path], refusal: Call
) -> None:
    assert "only linear layers" in refusal("rollout", additive, "--prompt", "x")
    assert refusal("rollout", run_folder("gpt2"), "--prompt", "x").startswith("run: a gpt2 model given")
