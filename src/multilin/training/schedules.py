"""Learning-rate schedules: the factor by which the peak learning rate is multiplied in each step.

In step i = 0, 1, ... of N steps, the factor is a warm-up over w steps times the course of the schedule:

    min(1, (i + 1) / w) * course(i)

    linear        (N - i) / (N - w), at most 1
    cosine        (1 + cos(pi (i - w) / (N - w))) / 2, 1 before w
    constant      1
    tail          min(1, (1 - i / N) * tail): falls to 0 in the last 1 / tail of the run        (TScale)
    inverse_sqrt  min(1, sqrt(constant_steps / (i + 1)))                                        (ELiTA)

For a run with a time limit, N = i / s, where s is the share of the run's time that has passed. So the course ends when
the time ends, at any speed of the steps.
"""

import math

from multilin.architectures.base import TrainingDefaults
from multilin.errors import InputError
from multilin.training.settings import ScheduleRecipe, fill

# Fields of the recipe that only one schedule uses, and their defaults.
_OWN: dict[str, dict[str, float]] = {"tail": {"tail": 5.0}, "inverse_sqrt": {"constant_steps": 100}}


def resolve_schedule(recipe: ScheduleRecipe, defaults: TrainingDefaults) -> ScheduleRecipe:
    """The same section with every default filled in.

    Raises:
        InputError: a value is given that the schedule does not use.
    """
    name = recipe.name or defaults.schedule
    for user, fields in _OWN.items():
        for field in fields:
            if (given := getattr(recipe, field)) is not None and name != user:
                raise InputError(
                    f"schedule.{field}: {given!r} given, but only the schedule {user} uses it, "
                    f"and schedule.name is {name}"
                )
    return fill(recipe, name=name, warmup_steps=defaults.warmup_steps, **_OWN.get(name, {}))


def rate_factor(recipe: ScheduleRecipe, step: int, max_steps: float) -> float:
    """The factor in a step (counted from 0) of a run of `max_steps` steps, for a resolved recipe."""
    assert recipe.name is not None, "a schedule needs a recipe without open fields; see resolve_recipe"
    assert recipe.warmup_steps is not None
    warmup_steps, tail, constant_steps = recipe.warmup_steps, recipe.tail or 0.0, recipe.constant_steps or 0
    rest = max(max_steps - warmup_steps, 1)
    courses = {
        "linear": (max_steps - step) / rest,
        "cosine": 0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, (step - warmup_steps) / rest)))),
        "constant": 1.0,
        "tail": (1 - step / max_steps) * tail,
        "inverse_sqrt": math.sqrt(constant_steps / (step + 1)),
    }
    return min(1.0, (step + 1) / max(warmup_steps, 1)) * min(1.0, max(0.0, courses[recipe.name]))
