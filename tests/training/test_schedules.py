import math
from types import SimpleNamespace

import pytest
import torch

from multilin.architectures.base import TrainingDefaults
from multilin.training.loop import _set_rates
from multilin.training.schedules import rate_factor, resolve_schedule
from multilin.training.settings import ScheduleRecipe

SCHEDULES = ("linear", "cosine", "constant", "tail", "inverse_sqrt")


def factors(name: str, max_steps: int, warmup_steps: int = 0, **options: float) -> list[float]:
    given = ScheduleRecipe(name=name, warmup_steps=warmup_steps, **options)
    recipe = resolve_schedule(given, TrainingDefaults())
    return [rate_factor(recipe, step, max_steps) for step in range(max_steps + 3)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_warm_up_rises_in_equal_steps_and_wastes_none(name: str) -> None:
    found = factors(name, 1000, warmup_steps=4)
    assert found[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


@pytest.mark.parametrize("name", SCHEDULES)
def test_factors_stay_between_0_and_1(name: str) -> None:
    for max_steps, warmup_steps in ((1, 0), (3, 7), (50, 10)):
        assert all(0 <= factor <= 1 for factor in factors(name, max_steps, warmup_steps))


def test_the_courses_are_those_of_their_formulas() -> None:
    assert factors("linear", 10)[5] == pytest.approx(0.5)
    assert factors("cosine", 8)[2] == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))
    assert factors("constant", 10)[10] == 1
    tail = factors("tail", 10, tail=5)
    assert tail == pytest.approx([1.0] * 9 + [0.5, 0, 0, 0])
    falling = factors("inverse_sqrt", 400, constant_steps=100)
    assert falling[:100] == [1.0] * 100
    assert 1e-3 * falling[399] == pytest.approx(1e-2 / math.sqrt(400))


def test_a_schedule_acts_on_every_group() -> None:
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": rate} for rate in (1.0, 0.5)]
    recipe = SimpleNamespace(
        schedule=ScheduleRecipe(name="tail", warmup_steps=2, tail=2.0), training=SimpleNamespace(num_steps=10)
    )
    run = SimpleNamespace(recipe=recipe, limit=None, optimizer=torch.optim.SGD(groups), base_rates=[1.0, 0.5], step=0)
    for run.step, rates in ((0, [0.5, 0.25]), (7, [0.6, 0.3]), (8, [0.4, 0.2])):
        assert _set_rates(run) == pytest.approx(rates[0])
        assert [group["lr"] for group in run.optimizer.param_groups] == pytest.approx(rates)
