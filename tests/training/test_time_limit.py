"""Runs that end by the clock, on a clock that the test moves."""

import dataclasses
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from multilin.training import loop, time_limit
from multilin.training.loop import train
from multilin.training.order import BlockOrder
from multilin.training.outcomes import TrainingFailed, TrainingInterrupted
from multilin.training.progress import TrainingProgress
from multilin.training.recipe import Recipe, load_recipe
from tests.training.conftest import Tiny, metrics
from tests.training.elastic import run_on
from tests.training.test_distributed import written

VALIDATION = 4.0  # seconds


class Clock:
    """Moves by so many seconds in every step: `seconds(step)`, from 1."""

    def __init__(self) -> None:
        self.now = 0.0
        self.seconds: Callable[[int], float] = lambda step: 2.0
        self.stop_after: int | None = None

    def __call__(self) -> float:
        return self.now

    def pass_step(self, step: int, model: object) -> None:
        """A step takes its time."""
        self.now += self.seconds(step)
        if step == self.stop_after:
            signal.raise_signal(signal.SIGINT)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock, validate = Clock(), loop._validate

    def slow_validate(run: Any) -> dict[str, float]:
        clock.now += VALIDATION
        return validate(run)

    monkeypatch.setattr(time_limit, "monotonic", clock)
    monkeypatch.setattr(loop, "_validate", slow_validate)
    return clock


def timed(recipe: Recipe, minutes: float, **training: Any) -> Recipe:
    length = {"max_steps": None, "minutes": minutes, "log_every_steps": 1}
    plan = dataclasses.replace(recipe.training, **{**length, **training})
    return dataclasses.replace(recipe, training=plan)


@pytest.mark.parametrize(
    "seconds",
    [lambda step: 2.0, lambda step: 2.0 if step < 20 else 5.0, lambda step: 4.0 if step < 9 else 0.5, lambda step: 0.3],
    ids=["steady", "slows down", "speeds up", "fast"],
)
def test_a_run_uses_its_time_and_the_rate_falls_to_its_end(
    tiny: Tiny, tmp_path: Path, clock: Clock, seconds: Callable[[int], float]
) -> None:
    clock.seconds, clock.now = seconds, 10.0  # ten seconds were gone before
    result = train(timed(tiny(tmp_path / "run"), 3), before_step=clock.pass_step, began=0.0)
    assert 0.95 * 180 <= clock.now + time_limit.ENDING + 2 * time_limit.FIRST_SAVE <= 1.02 * 180
    rates = [line["learning_rate"] for line in metrics(result.output)]
    assert rates[2] == pytest.approx(0.01, rel=0.1)
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert rates[-1] < 0.01 * 0.06
    assert result.validation_bits_per_byte > 0


def test_at_a_steady_speed_the_rates_are_those_of_a_run_of_as_many_steps(
    tiny: Tiny, tmp_path: Path, clock: Clock
) -> None:
    plan = {"eval_every_steps": 0, "save_every_steps": 0}
    result = train(timed(tiny(tmp_path / "run"), 2, **plan), before_step=clock.pass_step, began=0.0)
    same = train(tiny(tmp_path / "same", **{"training.max_steps": result.steps, "training.log_every_steps": 1}))
    for line, expected in zip(metrics(result.output), metrics(same.output), strict=True):
        assert line["learning_rate"] == pytest.approx(expected["learning_rate"], abs=0.01 * 0.05)


def test_the_clock_stands_still_between_two_sittings(tiny: Tiny, tmp_path: Path, clock: Clock) -> None:
    recipe = timed(tiny(tmp_path / "run"), 3)
    clock.stop_after = 30
    with pytest.raises(TrainingInterrupted, match=r"stopped after step 30, \d\d % of the run; the checkpoint is saved"):
        train(recipe, before_step=clock.pass_step, began=0.0)
    used, clock.stop_after = clock.now, None
    clock.now = began = used + 1000
    clock.now += 10  # reading the text again
    result = train(recipe, resume=True, before_step=clock.pass_step, began=began)
    in_all = used + clock.now - began
    assert 0.95 * 180 <= in_all + time_limit.ENDING + 2 * time_limit.FIRST_SAVE <= 1.02 * 180
    rates = [line["learning_rate"] for line in metrics(result.output)]
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert rates[-1] < 0.01 * 0.06


def test_a_run_that_is_over_makes_no_more_steps(tiny: Tiny, tmp_path: Path, clock: Clock) -> None:
    recipe = timed(tiny(tmp_path / "run"), 1)
    first = train(recipe, before_step=clock.pass_step, began=0.0)
    files = ["metrics.jsonl", "model.safetensors"]
    written = [(tmp_path / "run" / name).read_bytes() for name in files]
    said: list[str] = []
    progress = TrainingProgress()
    progress.message = said.append
    again = train(recipe, resume=True, before_step=clock.pass_step, began=clock.now, progress=progress)
    assert said == [f"is complete after step {first.steps}"]
    assert again.steps == first.steps
    assert again.validation_bits_per_byte == first.validation_bits_per_byte
    assert [(tmp_path / "run" / name).read_bytes() for name in files] == written


@pytest.mark.parametrize(("eval_every_steps", "last"), [(0, 22), (5, 17)])
def test_a_run_that_is_stopped_in_its_last_seconds_is_finished_by_the_next_sitting(
    tiny: Tiny, tmp_path: Path, clock: Clock, eval_every_steps: int, last: int
) -> None:
    """The start of the next sitting uses up what was left, so that no time is left for a step: it makes one more."""
    recipe = timed(tiny(tmp_path / "run"), 1, eval_every_steps=eval_every_steps)
    clock.stop_after = last
    with pytest.raises(TrainingInterrupted, match=f"stopped after step {last}"):
        train(recipe, before_step=clock.pass_step, began=0.0)
    clock.stop_after, began = None, clock.now
    clock.now += 10
    result = train(recipe, resume=True, before_step=clock.pass_step, began=began)
    assert result.steps == last + 1
    assert result.validation_loss == metrics(result.output)[-1]["validation_loss"]
    assert metrics(result.output)[-1]["step"] == last + 1


def test_every_block_is_read_once_in_a_pass(
    tiny: Tiny, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    recipe = timed(tiny(tmp_path / "run"), 10, save_every_steps=0, eval_every_steps=0)

    def note_order(order: BlockOrder, plan: Any, step: int, device: Any) -> Any:
        if step == 1:
            read.extend(order.block_index(position) for position in range(2 * len(order.blocks)))
        return batches(order, plan, step, device)

    batches = loop.step_batches
    monkeypatch.setattr(loop, "step_batches", note_order)
    train(recipe, before_step=clock.pass_step, began=0.0)
    half = len(read) // 2
    assert sorted(read[:half]) == sorted(read[half:]) == list(range(half))


def test_time_that_is_gone_before_the_first_step_is_reported(tiny: Tiny, tmp_path: Path, clock: Clock) -> None:
    clock.now = 29.0
    with pytest.raises(TrainingFailed, match=r"training\.minutes: 0\.5 given, but 29 s had passed before the first"):
        train(timed(tiny(tmp_path / "run"), 0.5), before_step=clock.pass_step, began=0.0)


def test_a_run_that_ends_in_its_warm_up_says_so(tiny: Tiny, tmp_path: Path, clock: Clock) -> None:
    clock.seconds = lambda step: 20.0
    with pytest.warns(UserWarning, match=r"training\.minutes: 1 given, enough for only 2 .* rises for 2 steps \("):
        train(timed(tiny(tmp_path / "run"), 1), before_step=clock.pass_step, began=0.0)


def test_a_run_with_steps_and_minutes_ends_after_the_first_of_them(tiny: Tiny, tmp_path: Path, clock: Clock) -> None:
    """Where the steps end it, the learning rate is that of a run of so many steps."""
    steps = timed(tiny(tmp_path / "steps"), 20, max_steps=40)
    same = train(tiny(tmp_path / "same", **{"training.max_steps": 40, "training.log_every_steps": 1}))
    result = train(steps, before_step=clock.pass_step, began=0.0)
    assert result.steps == 40
    assert [line["learning_rate"] for line in metrics(result.output)] == pytest.approx(
        [line["learning_rate"] for line in metrics(same.output)], abs=0.01 * 0.05
    )
    clock.now = 0.0
    result = train(timed(tiny(tmp_path / "time"), 2, max_steps=10**6), before_step=clock.pass_step, began=0.0)
    assert result.steps < 100
    assert metrics(result.output)[-1]["learning_rate"] < 0.01 * 0.06


def test_a_given_length_replaces_that_of_the_recipe() -> None:
    both = load_recipe(None, {"training.minutes": 2, "training.max_steps": 5}).training
    assert (both.minutes, both.max_steps) == (2, 5)
    assert load_recipe("demo", {"training.minutes": 2}).training.max_steps is None
    assert load_recipe("demo", {"training.minutes": None}).training.max_steps == load_recipe("demo").training.max_steps


@pytest.mark.slow
def test_two_processes_end_at_the_same_step(tiny: Tiny, tmp_path: Path) -> None:
    recipe = timed(tiny(tmp_path / "run"), 0.6)
    run_on(2, written(tmp_path, recipe))
    last = metrics(tmp_path / "run")[-1]
    assert last["learning_rate"] < 0.01 * 0.2
    assert "validation_bits_per_byte" in last


def test_the_state_goes_on_where_it_was() -> None:
    clock = time_limit.TimeLimit(1.0, 1000, time_limit.monotonic(), 1.0)
    clock.start()
    with clock.pause("saving"):
        pass
    clock.advance(1)
    other = time_limit.TimeLimit(1.0, 1000, time_limit.monotonic(), 1.0)
    other.load_state_dict(clock.state_dict())
    assert other.share == clock.share
    assert other.used == pytest.approx(clock.used, abs=0.5)
    assert other.kept_back == clock.kept_back


def test_what_comes_before_the_first_step_of_a_sitting_is_no_part_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time_limit, "monotonic", lambda: now)
    limit = time_limit.TimeLimit(2.0, 1000, 0.0, 1.0)
    now = 20.0
    limit.start()
    now = 30.0
    limit.advance(1)
    state = limit.state_dict()
    limit = time_limit.TimeLimit(2.0, 1000, now, 1.0)
    limit.load_state_dict(state)
    now = 70.0  # 40 seconds to start again
    limit.start()
    now = 71.0
    limit.advance(2)
    assert limit.share == pytest.approx(11 / (120 - limit.kept_back - 60), abs=0.01)
