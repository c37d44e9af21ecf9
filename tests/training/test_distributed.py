from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from multilin.errors import InputError
from multilin.training import loop
from multilin.training.loop import train
from multilin.training.recipe import Recipe, load_recipe, save_recipe
from multilin.training.settings import TrainingRecipe
from tests.training.conftest import Stopped, Tiny, assert_same_run, metrics
from tests.training.elastic import blocks_of_steps, note_blocks, run_on

EIGHT_BLOCKS = {"training.global_batch_size": 8}  # forward passes of two, shared out over 1, 2 or 4 processes


@pytest.fixture(scope="package")
def whole(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in one process, with dropout and without a stop, for others to be compared with."""
    output = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("multilin.training.loop.draw_loss", lambda lines, path: path.touch())
        patch.setattr(loop, "step_batches", loop.step_batches)  # to be undone
        note_blocks(output.with_name("run-0.blocks"))
        train(tiny(output, **EIGHT_BLOCKS))
    return output


def written(folder: Path, recipe: Recipe, name: str = "recipe.yaml") -> Path:
    save_recipe(recipe, folder / name)
    return folder / name


def assert_same_course(run: Path, whole: Path) -> None:
    """Every line of metrics, and the weights, agree up to rounding."""
    for line, expected in zip(metrics(run), metrics(whole), strict=True):
        assert line == pytest.approx(expected, rel=1e-4)
    weights, others = load_file(run / "model.safetensors"), load_file(whole / "model.safetensors")
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, others[name], rtol=1e-3, atol=2e-5)


@pytest.mark.slow
def test_a_run_goes_on_with_more_and_fewer_processes(tiny: Tiny, whole: Path, tmp_path: Path) -> None:
    recipe = written(tmp_path, tiny(tmp_path / "run", **EIGHT_BLOCKS))
    run_on(2, recipe, "SIGTERM:5:1")
    run_on(4, recipe, "resume", "SIGTERM:8:3")
    run_on(1, recipe, "resume")
    assert_same_course(tmp_path / "run", whole)
    read = blocks_of_steps(tmp_path)
    assert read == blocks_of_steps(whole.parent)
    assert {len(blocks) for blocks in read.values()} == {8}


@pytest.mark.slow
def test_torchrun_is_stopped_and_its_run_resumes_bit_for_bit(tiny: Tiny, tmp_path: Path) -> None:
    recipe = written(tmp_path, tiny(tmp_path / "whole"))
    run_on(2, recipe)
    recipe = written(tmp_path, tiny(tmp_path / "stopped"))
    run_on(2, recipe, "SIGTERM:5:torchrun", status=1)
    run_on(2, recipe, "resume")
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")


@pytest.mark.slow
def test_a_killed_worker_is_replaced_and_the_run_goes_on_at_its_checkpoint(
    tiny: Tiny, whole: Path, tmp_path: Path
) -> None:
    recipe = written(tmp_path, tiny(tmp_path / "run", **EIGHT_BLOCKS))
    run_on(2, recipe, "SIGKILL:7:1", options=("--max-restarts", "1"))
    assert len(list(tmp_path.glob("*.blocks"))) == 4  # of two processes, and of two more
    assert_same_course(tmp_path / "run", whole)
    again = blocks_of_steps(tmp_path)
    expected = blocks_of_steps(whole.parent)
    repeated = {step for step, blocks in again.items() if blocks != expected[step]}
    assert repeated <= {4, 5, 6}  # after the checkpoint of step 4, counted from 0


@pytest.mark.slow
def test_one_recipe_without_a_global_batch_goes_on_with_that_of_its_run(tiny: Tiny, tmp_path: Path) -> None:
    recipe = written(tmp_path, tiny(tmp_path / "run", **{"training.global_batch_size": None}))
    run_on(2, recipe, "SIGTERM:3:0")
    run_on(1, recipe, "resume")
    assert load_recipe(tmp_path / "run").training.global_batch_size == 4
    assert metrics(tmp_path / "run")[-1]["tokens"] == 12 * 4 * 16


def test_processes_that_are_started_again_keep_the_batch_of_their_run(
    tiny: Tiny, tmp_path: Path, stopped: Stopped, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped(tiny(tmp_path / "run"), 5)  # with the blocks of two processes
    monkeypatch.setattr("multilin.training.loop.were_restarted", lambda: True)
    result = train(tiny(tmp_path / "run", **{"training.global_batch_size": None}))
    assert (result.steps, result.tokens) == (12, 12 * 4 * 16)


@pytest.mark.parametrize(
    ("blocks", "num_devices", "expected"), [(8, 1, (2, 4)), (8, 2, (2, 2)), (8, 8, (1, 1)), (None, 3, (2, 1))]
)
def test_a_step_is_shared_out(blocks: int | None, num_devices: int, expected: tuple[int, int]) -> None:
    assert TrainingRecipe(batch_size=2, global_batch_size=blocks).split(num_devices) == expected


@pytest.mark.parametrize(
    ("blocks", "num_devices", "message"),
    [
        (8, 3, r"training\.global_batch_size: 8 given, but it must be a multiple of the number of processes, 3"),
        (6, 2, r"training\.global_batch_size: 6 given, but it must be a multiple of 4: training\.batch_size 2 on 2"),
    ],
)
def test_a_step_that_cannot_be_shared_out_is_refused_before_any_work(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: int, num_devices: int, message: str
) -> None:
    launched = {"RANK": 0, "WORLD_SIZE": num_devices, "LOCAL_RANK": 0, "MASTER_ADDR": "localhost", "MASTER_PORT": 29500}
    for name, value in launched.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(InputError, match=message):
        train(tiny(tmp_path / "run", **{"training.global_batch_size": blocks}))
    assert list(tmp_path.iterdir()) == []
