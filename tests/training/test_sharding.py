import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from multilin.architectures import architectures
from multilin.errors import InputError
from multilin.model.factory import BASELINES, create_model, training_defaults
from multilin.training.fsdp import SHARDS, ShardWriter, check_shard, read_shards, shard
from multilin.training.loop import train
from multilin.training.optimizers import OPTIMIZERS, build_optimizer, resolve_optimizer
from multilin.training.settings import LoraRecipe, OptimizerRecipe, TrainingRecipe
from multilin.training.step import TrainedLoss, baseline_loss
from tests.training.conftest import Tiny, metrics
from tests.training.elastic import run_on
from tests.training.test_distributed import EIGHT_BLOCKS, assert_same_course, written

RUNS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "normalized_sgd": {"optimizer.name": "normalized_sgd", "model.architecture": "threelin"},
    "matrix_moment": {"optimizer.name": "matrix_moment", "model.architecture": "tscale"},  # untied: two tensors of rows
    "recomputed": {"training.gradient_checkpointing": True, "model.num_layers": 2},
    "int8": {"training.precision": "int8", "model.architecture": "threelin"},
    "gpt2": {"model.architecture": "gpt2"},
    "smoothed": {"model.architecture": "llama", "training.label_smoothing": 0.1},
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*reads across document borders")
def test_a_divided_model_learns_as_a_whole_one_and_is_saved_as_one(tiny: Tiny, tmp_path: Path) -> None:
    recipes = []
    for name, changes in RUNS.items():
        rest = {"training.max_steps": 6, "training.save_every_steps": 3, **EIGHT_BLOCKS, **changes}
        train(tiny(tmp_path / f"{name}-whole", **rest))
        recipe = tiny(tmp_path / name, **rest, **{"training.shard": "fsdp"})
        recipes.append(written(tmp_path, recipe, f"{name}.yaml"))
    run_on(2, *recipes)
    for name in RUNS:
        assert_same_course(tmp_path / name, tmp_path / f"{name}-whole")
        config = (tmp_path / name / "config.json").read_text()
        assert config == (tmp_path / f"{name}-whole" / "config.json").read_text()


@pytest.mark.slow
def test_a_divided_model_in_bf16_stays_close_to_a_whole_one(tiny: Tiny, tmp_path: Path) -> None:
    rest = {"training.precision": "bf16", "training.max_steps": 6, **EIGHT_BLOCKS}
    train(tiny(tmp_path / "whole", **rest))
    run_on(2, written(tmp_path, tiny(tmp_path / "run", **rest, **{"training.shard": "fsdp"})))
    for line, expected in zip(metrics(tmp_path / "run"), metrics(tmp_path / "whole"), strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=4e-3)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "matrix_moment"])
def test_a_divided_run_goes_on_with_more_and_fewer_processes(tiny: Tiny, tmp_path: Path, optimizer: str) -> None:
    rest = {"optimizer.name": optimizer, **EIGHT_BLOCKS}
    train(tiny(tmp_path / "whole", **rest))
    recipe = written(tmp_path, tiny(tmp_path / "run", **rest, **{"training.shard": "fsdp"}))
    run_on(2, recipe, "SIGTERM:5:1")
    run_on(4, recipe, "resume", "SIGTERM:7:2")
    train(tiny(tmp_path / "run", **rest), resume=True)  # one process, not divided
    assert_same_course(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"communication": "int8"}, r"training\.communication: 'int8' given, but training\.shard 'fsdp' works"),
        ({"lora": LoraRecipe(rank=2)}, r"training\.lora: adapters given, but training\.shard 'fsdp' works"),
        ({"compile": True}, r"training\.compile: True given, but training\.shard 'fsdp' works"),
    ],
)
def test_what_a_divided_model_cannot_do_is_refused(changes: dict[str, Any], message: str) -> None:
    check_shard(TrainingRecipe(**changes))
    with pytest.raises(InputError, match=message):
        check_shard(TrainingRecipe(shard="fsdp", **changes))


def learner(architecture: str, optimizer: str, *, divided: bool) -> tuple[PreTrainedModel, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = create_model(architecture, vocab_size=13, hidden_size=16, num_layers=2, n_positions=11)
    if divided:
        shard(model, torch.device("cpu"))
    recipe = resolve_optimizer(OptimizerRecipe(name=optimizer), training_defaults(architecture))
    return model, build_optimizer(recipe, model, decayed=[name for name, p in model.named_parameters() if p.ndim > 1])


def losses(model: PreTrainedModel, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    ids, values = torch.arange(22).view(2, 11) % 13, []
    for step in range(steps):
        torch.manual_seed(step)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(loss.item())
    return values


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("architecture", architectures())
def test_operators_and_optimizers_take_divided_tensors(architecture: str, optimizer: str) -> None:
    make = functools.partial(learner, architecture, optimizer)
    expected = losses(*make(divided=False), steps=3)
    assert losses(*make(divided=True), steps=3) == pytest.approx(expected, rel=1e-5)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("architecture", BASELINES)
def test_a_divided_baseline_has_the_loss_of_a_whole_one(architecture: str) -> None:
    model, _ = learner(architecture, "adamw", divided=False)
    ids = torch.arange(22).view(2, 11) % 13
    inputs = {"input_ids": ids, "labels": ids.where(ids < 4, -100)}
    expected = baseline_loss(model, inputs, 0.1, num_items=7)
    shard(model, torch.device("cpu"), baseline_loss=baseline_loss)
    found = TrainedLoss(model, 0.1, is_sparse=True)(inputs, num_items=7)
    torch.testing.assert_close(found, expected)
    found.backward()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("divided", [True, False])
def test_parts_are_loaded_as_they_were_saved(optimizer: str, divided: bool, tmp_path: Path) -> None:
    model, state = learner("tscale", optimizer, divided=True)
    losses(model, state, steps=2)
    write = ShardWriter().copy(tmp_path, model, state)
    expected = losses(model, state, steps=3)  # what was copied does not change any more
    write()
    other = learner("tscale", optimizer, divided=divided)
    read_shards(tmp_path, *other)
    assert losses(*other, steps=3) == pytest.approx(expected, rel=1e-5)


@pytest.mark.usefixtures("alone")
def test_parts_that_do_not_know_their_places_are_one_sentence(tmp_path: Path) -> None:
    model, state = learner("tscale", "adamw", divided=True)
    ShardWriter().copy(tmp_path, model, state)()
    (file,) = (tmp_path / SHARDS).iterdir()
    save_file({name: part[: len(part) // 2] for name, part in load_file(file).items() if part.ndim}, file)
    with pytest.raises(InputError, match=rf"checkpoint {tmp_path}: shards cannot be read"):
        read_shards(tmp_path, model, state)
