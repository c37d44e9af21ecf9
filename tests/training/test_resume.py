import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from multilin.errors import InputError
from multilin.training.loop import train
from multilin.training.outcomes import RunResult, TrainingInterrupted
from multilin.training.progress import TrainingProgress
from multilin.training.recipe import save_recipe
from tests.processes import PYTHON, run, running
from tests.training.conftest import AtStep, Stopped, Tiny, assert_same_run, assert_same_weights, metrics

TRAIN_FROM_A_FILE = """
import sys
import torch
torch.set_num_threads(1)
from multilin.training.recipe import load_recipe
from multilin.training.loop import train
train(load_recipe(sys.argv[1]), resume="resume" in sys.argv)
"""


def send(number: signal.Signals) -> Callable[[torch.nn.Module], object]:
    return lambda model: signal.raise_signal(number)


@pytest.mark.quick
@pytest.mark.parametrize(("step", "number", "code"), [(3, signal.SIGINT, 130), (7, signal.SIGTERM, 143)])
def test_a_stopped_run_resumes_bit_for_bit(
    tiny: Tiny, tmp_path: Path, at_step: AtStep, uninterrupted: RunResult, step: int, number: Any, code: int
) -> None:
    recipe = tiny(tmp_path / "run")
    at_step(step, send(number))
    with pytest.raises(TrainingInterrupted, match=rf"stopped after step {step} of 12; .*train .*run --resume") as stop:
        train(recipe)
    assert stop.value.exit_code == code
    assert metrics(tmp_path / "run")[-1]["step"] <= step
    at_step(0, lambda model: None)
    result = train(recipe, resume=True)
    assert_same_run(result.output, uninterrupted.output)
    assert (result.steps, result.tokens, result.loss) == (12, uninterrupted.tokens, uninterrupted.loss)


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer.name": "normalized_sgd"},
        {"optimizer.name": "matrix_moment", "schedule.name": "tail"},
        {"optimizer.name": "matrix_moment", "model.architecture": "tscale"},  # untied, so two tensors of rows
        {"optimizer.name": "muon"},
    ],
)
def test_every_optimizer_resumes_bit_for_bit(
    tiny: Tiny, tmp_path: Path, stopped: Stopped, changes: dict[str, Any]
) -> None:
    whole = train(tiny(tmp_path / "whole", **changes))
    result = train(stopped(tiny(tmp_path / "run", **changes), 5), resume=True)
    assert_same_run(result.output, whole.output)


def test_another_optimizer_cannot_go_on(tiny: Tiny, uninterrupted: RunResult) -> None:
    with pytest.raises(InputError, match=r"optimizer\.name: 'matrix_moment' given, but the run .* with 'adamw'"):
        train(tiny(uninterrupted.output, **{"optimizer.name": "matrix_moment"}), resume=True)


def test_the_signals_act_as_usual_after_a_run(tiny: Tiny, tmp_path: Path, stopped: Stopped) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    stopped(tiny(tmp_path / "run"), 1)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


@pytest.fixture
def usual_interrupt() -> Iterator[None]:
    """Ctrl-C as in a terminal: a process started in the background inherits that it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("usual_interrupt")
def test_a_second_signal_does_not_wait(tiny: Tiny, tmp_path: Path, at_step: AtStep) -> None:
    def twice(model: torch.nn.Module) -> None:
        send(signal.SIGINT)(model)
        send(signal.SIGINT)(model)

    at_step(6, twice)
    with pytest.raises(KeyboardInterrupt):
        train(tiny(tmp_path / "run"))
    assert [path.name for path in (tmp_path / "run.checkpoints").iterdir()] == ["checkpoint-4"]


def test_a_run_that_was_killed_goes_back_to_its_last_checkpoint(
    tiny: Tiny, tmp_path: Path, stopped: Stopped, uninterrupted: RunResult
) -> None:
    recipe = stopped(tiny(tmp_path / "run"), 7, None)
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "tok')  # what a process may leave that is killed while it writes
    result = train(recipe, resume=True)
    assert_same_run(result.output, uninterrupted.output)


def test_a_run_stopped_before_its_first_checkpoint_starts_again(
    tiny: Tiny, tmp_path: Path, stopped: Stopped, uninterrupted: RunResult
) -> None:
    recipe = stopped(tiny(tmp_path / "run"), 2, None)
    progress, messages = TrainingProgress(), []
    progress.message = messages.append
    result = train(recipe, resume=True, progress=progress)
    assert messages == [f"no checkpoint in {tmp_path / 'run.checkpoints'}: training starts at the first step"]
    assert metrics(result.output) == metrics(uninterrupted.output)


def test_resuming_a_finished_run_repeats_nothing(tiny: Tiny, tmp_path: Path, at_step: AtStep) -> None:
    first = train(tiny(tmp_path / "run"))
    weights, lines = (first.output / "model.safetensors").read_bytes(), metrics(first.output)
    at_step(12, lambda model: pytest.fail("a step was trained again"))
    again = train(tiny(tmp_path / "run"), resume=True)
    assert (first.output / "model.safetensors").read_bytes() == weights
    assert metrics(first.output) == lines
    assert again.validation_bits_per_byte == first.validation_bits_per_byte


@pytest.mark.parametrize(
    "changes",
    [
        {"training.max_steps": 24},
        {"optimizer.learning_rate": 0.02},
        {"model.options.dropout": 0.2},
        {"training.batch_size": 4},
    ],
)
def test_a_changed_recipe_is_refused_and_named(
    tiny: Tiny, uninterrupted: RunResult, changes: dict[str, object]
) -> None:
    name, value = next(iter(changes.items()))
    with pytest.raises(InputError, match=rf"{name}: {value} given, but the run in .* was started with"):
        train(tiny(uninterrupted.output, **changes), resume=True)


def test_how_often_a_run_reports_may_change(
    tiny: Tiny, tmp_path: Path, stopped: Stopped, uninterrupted: RunResult
) -> None:
    stopped(tiny(tmp_path / "run"), 3)
    result = train(
        tiny(tmp_path / "run", **{"training.eval_every_steps": 2, "training.log_every_steps": 5}), resume=True
    )
    assert_same_weights(result.output, uninterrupted.output)


def test_a_changed_text_is_refused(tiny: Tiny, tmp_path: Path, stopped: Stopped, text_file: Path) -> None:
    own_text = tmp_path / "text.jsonl"
    own_text.write_text(text_file.read_text())
    recipe = stopped(tiny(tmp_path / "run", **{"data.source": str(own_text)}), 5)
    own_text.write_text(text_file.read_text().replace("cat", "cow"))
    with pytest.raises(InputError, match=r"data\.source: .*text\.jsonl .* has changed"):
        train(recipe, resume=True)


def test_text_that_a_newer_tokenizers_packs_again_is_the_same_text(
    tiny: Tiny, tmp_path: Path, stopped: Stopped, uninterrupted: RunResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = stopped(tiny(tmp_path / "run"), 5)
    monkeypatch.setattr("tokenizers.__version__", "99.0")
    assert_same_run(train(recipe, resume=True).output, uninterrupted.output)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_sigkill_at_a_random_moment_loses_nothing(tiny: Tiny, tmp_path: Path, seed: int) -> None:
    folder, recipe_file = tmp_path / "run", tmp_path / "recipe.yaml"
    save_recipe(tiny(folder, **{"training.save_every_steps": 1, "training.max_steps": 200}), recipe_file)
    command = [*PYTHON, "-c", TRAIN_FROM_A_FILE, str(recipe_file)]
    with running(command) as process:
        while process.poll() is None and not list(tmp_path.glob("run.checkpoints/checkpoint-*")):
            time.sleep(0.02)
        time.sleep(random.Random(seed).uniform(0.1, 1.5))
        process.kill()
        assert process.wait() == -signal.SIGKILL
    run([*command, "resume"])
    whole = train(tiny(tmp_path / "whole", **{"training.max_steps": 200}))
    assert_same_weights(folder, whole.output)
