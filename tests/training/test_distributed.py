from collections.abc import Callable
from pathlib import Path

import pytest

from multilin.training.recipe import Recipe, save_recipe
from multilin.training.trainer import train
from tests.processes import TWO_DEVICES, run
from tests.training.conftest import assert_same_weights, metrics

STOPPED_ON_ONE_DEVICE = """
import os, signal, sys
from multilin.training.callbacks import StepCallback
from multilin.training.outcomes import TrainingInterrupted
from multilin.training.recipe import load_recipe
from multilin.training.trainer import train

def stop(self, args, state, control, **kwargs):
    if state.global_step == 5 and os.environ["RANK"] == "1" and "stop" in sys.argv:
        signal.raise_signal(signal.SIGTERM)

StepCallback.on_step_begin = stop
try:
    train(load_recipe(sys.argv[1]), resume="resume" in sys.argv)
except TrainingInterrupted as interruption:
    assert interruption.exit_code == 143
"""


def on_two_devices(folder: Path, recipe: Recipe, *words: str) -> None:
    """Train in two processes, as torchrun starts them."""
    recipe_file, script = folder / "recipe.yaml", folder / "script.py"
    save_recipe(recipe, recipe_file)
    script.write_text(STOPPED_ON_ONE_DEVICE)
    run([*TWO_DEVICES, str(script), str(recipe_file), *words])


@pytest.mark.slow
def test_two_devices_are_one_with_twice_the_batch(tiny: Callable[..., Recipe], tmp_path: Path) -> None:
    exact = {"model.options.dropout": 0.0}
    accumulated = train(tiny(tmp_path / "one", **exact))
    parallel = tiny(tmp_path / "two", **exact, **{"training.gradient_accumulation": 1})
    on_two_devices(tmp_path, parallel)
    for one, two in zip(metrics(accumulated.output), metrics(tmp_path / "two"), strict=True):
        assert two == pytest.approx(one, rel=1e-4)


@pytest.mark.slow
def test_a_run_on_two_devices_stops_and_resumes_bit_for_bit(tiny: Callable[..., Recipe], tmp_path: Path) -> None:
    on_two_devices(tmp_path, tiny(tmp_path / "whole"))
    on_two_devices(tmp_path, tiny(tmp_path / "stopped"), "stop")
    on_two_devices(tmp_path, tiny(tmp_path / "stopped"), "resume")
    assert_same_weights(tmp_path / "stopped", tmp_path / "whole")
    assert metrics(tmp_path / "stopped") == metrics(tmp_path / "whole")
