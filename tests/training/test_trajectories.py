"""Training takes the steps that it always took: the losses of 30 steps, stored for every optimizer and kind of run.

`python -m tests.training.test_trajectories` writes them anew, where a change of the numbers is meant.
"""

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from multilin.training.loop import train
from multilin.training.recipe import Recipe, load_recipe, save_recipe
from tests.training.conftest import WORDS
from tests.training.elastic import run_on

STORED = Path(__file__).with_name("trajectories.json")
OPTIMIZERS = ("adamw", "normalized_sgd", "matrix_moment", "muon")
ONE_PROCESS: dict[str, dict[str, Any]] = {
    **{f"{name}": {"optimizer.name": name, "optimizer.learning_rate": 0.01} for name in OPTIMIZERS},
    "one pass a step": {"training.batch_size": 4},
    "clipped": {"optimizer.clip_norm": 0.1},
    "smoothed": {"training.label_smoothing": 0.1},
    "tscale": {"model.architecture": "tscale", "optimizer.learning_rate": None},
    "mingru": {"model.architecture": "mingru"},
    "hybrid": {"model.layers": [{"architecture": "elita"}, {"architecture": "mingru"}], "model.num_layers": None},
    "gpt2": {"model.architecture": "gpt2"},
    "gpt2 smoothed": {"model.architecture": "gpt2", "training.label_smoothing": 0.1},
    "llama": {"model.architecture": "llama"},
    "llama with a bias": {"model.architecture": "llama", "model.config": {"output_bias": "unigram"}},
    "checkpointed": {"training.gradient_checkpointing": True},
    "bf16": {"training.precision": "bf16"},
    "int8": {"training.precision": "int8"},
    "host": {"training.precision": "int8", "training.master": "host"},
    "task": {"data.source": "task:majority"},
    "by the clock": {"training.minutes": 1000, "schedule.name": "constant"},
}  # fmt: skip
TWO_PROCESSES: dict[str, dict[str, Any]] = {
    "two processes": {},
    "two processes, muon": {"optimizer.name": "muon"},
    "two processes, sharded": {"training.shard": "fsdp"},
    "two processes, int8 gradients": {"training.communication": "int8"},
    "two processes, llama": {"model.architecture": "llama"},
}


def recipe_of(folder: Path, changes: dict[str, Any]) -> Recipe:
    """A small model with dropout, and gradients accumulated over two passes."""
    text = folder / "text.jsonl"
    lines = (" ".join(WORDS[(i * i + j * j * 7 + i * j) % len(WORDS)] for j in range(60)) for i in range(60))
    text.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    defaults = {
        "model.architecture": "additive", "model.hidden_size": 16, "model.num_layers": 2, "model.n_positions": 32,
        "data.source": str(text), "data.validation_fraction": 0.1, "tokenizer.kind": "byte",
        "optimizer.learning_rate": 0.01, "schedule.warmup_steps": 5, "training.max_steps": 30,
        "training.batch_size": 2, "training.global_batch_size": 4, "training.precision": "float32",
        "training.eval_every_steps": 0, "training.save_every_steps": 15, "training.log_every_steps": 1,
        "output": str(folder / "run"),
    }  # fmt: skip
    return load_recipe(None, changes, defaults)


def course(folder: Path) -> list[list[float]]:
    """Loss and gradient norm of every step, and the last validation loss."""
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [*([line["loss"], line["grad_norm"]] for line in lines), [lines[-1]["validation_loss"]]]


def run(folder: Path, name: str) -> list[list[float]]:
    if name in ONE_PROCESS:
        train(recipe_of(folder, ONE_PROCESS[name]))
    else:
        save_recipe(recipe_of(folder, TWO_PROCESSES[name]), folder / "recipe.yaml")
        run_on(2, folder / "recipe.yaml")
    return course(folder)


@pytest.mark.filterwarnings("ignore:training.master", "ignore:llama reads across", "ignore:gpt2 reads across")
@pytest.mark.parametrize(
    "name", [*ONE_PROCESS, *(pytest.param(name, marks=pytest.mark.slow) for name in TWO_PROCESSES)]
)
def test_losses_are_those_that_were_stored(name: str, tmp_path: Path) -> None:
    stored = json.loads(STORED.read_text())[name]
    assert len(stored) == 31
    # Processors round differently: a bf16 run soon differs in its third digit, and int8 gradients, which are rounded at
    # random, have other norms.
    is_rounded = name in ("bf16", "int8", "host")
    exact = 1e-2 if "muon" in name else 1e-3  # Muon orthogonalises its updates in bf16
    for (loss, *norm), (expected, *expected_norm) in zip(run(tmp_path, name), stored, strict=True):
        assert loss == pytest.approx(expected, rel=0.02 if is_rounded else 1e-3)
        assert norm == pytest.approx(expected_norm, rel=0.15 if is_rounded else exact)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_run_takes_the_same_steps(name: str, tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, ONE_PROCESS[name])
    train(recipe)
    whole = course(tmp_path)
    (last,) = (tmp_path / "run.checkpoints").glob("checkpoint-30")
    last.rename(tmp_path / "last")
    train(dataclasses.replace(recipe), resume=True)
    assert course(tmp_path) == whole


if __name__ == "__main__":
    found = {}
    for case in (*ONE_PROCESS, *TWO_PROCESSES):
        with tempfile.TemporaryDirectory() as folder:
            found[case] = run(Path(folder), case)
    lines = (f"{json.dumps(case)}: {json.dumps(steps, separators=(',', ':'))}" for case, steps in found.items())
    STORED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
