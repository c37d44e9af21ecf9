import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from multilin.errors import InputError
from multilin.training.recipe import Recipe
from multilin.training.sharding import SHARDS
from multilin.training.trainer import train
from tests.training.conftest import metrics
from tests.training.elastic import run_on
from tests.training.test_distributed import EIGHT_BLOCKS, assert_same_course, written

Tiny = Callable[..., Recipe]
RUNS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "normalized_sgd": {"optimizer.name": "normalized_sgd", "model.architecture": "threelin"},
    "matrix_moment": {"optimizer.name": "matrix_moment", "model.architecture": "tscale"},  # untied: two tensors of rows
    "recomputed": {"training.gradient_checkpointing": True, "model.num_layers": 2},
    "gpt2": {"model.architecture": "gpt2"},
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*does not take document_ids")
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
    assert list((tmp_path / "run.checkpoints").glob("checkpoint-7/shards/shard-*.safetensors")) == []  # rotated


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training.communication": "int8"}, r"training\.communication: 'int8' given with training\.shard 'fsdp'"),
        ({"training.lora": {"rank": 2}}, r"training\.lora: adapters given with training\.shard 'fsdp'"),
        ({"training.compile": True}, r"training\.compile: True given with training\.shard 'fsdp'"),
    ],
)
def test_what_a_divided_model_cannot_do_is_refused(
    tiny: Tiny, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        train(tiny(tmp_path / "run", **{"training.shard": "fsdp"}, **changes))
    assert list(tmp_path.iterdir()) == []
