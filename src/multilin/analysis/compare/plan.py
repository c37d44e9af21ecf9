"""From a sweep to rows that are ready to be trained, with numbers of steps; every mistake is found before training."""

import dataclasses
from pathlib import Path
from typing import Any

import torch

from multilin.analysis.compare.rows import Choice, Plan, Row, rows_of
from multilin.analysis.compare.speeds import seconds_per_step
from multilin.analysis.compare.sweep import Sweep, choices_of
from multilin.analysis.costs import parameter_counts, training_flops_per_token
from multilin.errors import InputError, plural, prefixed
from multilin.settings.bounds import MOST_STEPS
from multilin.training.assemble import build_model, check_model, packing_remark, read_data
from multilin.training.progress import TrainingProgress

VALIDATIONS, CHECKPOINTS = 10, 4  # of a run, where the sweep says nothing else


def plan_rows(sweep: Sweep, progress: TrainingProgress) -> list[Plan]:
    """Everything that is known before training: the rows with their own values of what is tuned.

    Raises:
        InputError: a row that cannot be trained; it is named.
    """
    plans = []
    for row in rows_of(sweep):
        with prefixed(f"rows.{row.name}: ", f"rows.{row.name}."):
            first = row.first_choice(sweep)
            for choice in [choice for stage in sweep.stages for choice in choices_of(stage, first)]:
                check_model(row.with_choice(choice))
            plans.append(_plan(row, first, progress))
    return _with_budget(sweep, plans, progress)


def plan_choice(sweep: Sweep, plan: Plan, choice: Choice, progress: TrainingProgress) -> Plan:
    """The row of a plan with another choice.

    Raises:
        InputError: it cannot be trained.
    """
    other = dataclasses.replace(plan, choice=choice)
    if other.speed_name != plan.speed_name:
        (planned,) = _with_budget(sweep, [_plan(plan.row, choice, progress)], progress)
        return planned
    recipe = dataclasses.replace(plan.row.with_choice(choice), training=plan.recipe.training)
    steps = round((sweep.trial_share if sweep.stages else 1) * recipe.training.num_steps)
    if (warmup := recipe.schedule.warmup_steps or 0) >= steps:
        raise InputError(f"schedule.warmup_steps: {warmup} given for a trial of {plural(steps, 'step')}; give less")
    return dataclasses.replace(other, recipe=recipe)


def _plan(row: Row, choice: Choice, progress: TrainingProgress) -> Plan:
    recipe = row.with_choice(choice)
    check_model(recipe)
    text = read_data(recipe, progress.prepare)
    check_model(recipe, len(text.tokenizer))
    with torch.random.fork_rng():
        model = build_model(recipe, text)
    remark = packing_remark(recipe, model)
    flops = training_flops_per_token(model, recipe.model.n_positions)
    return Plan(row, choice, recipe, *parameter_counts(model), flops, text.identity, [remark] if remark else [])


def _with_budget(sweep: Sweep, plans: list[Plan], progress: TrainingProgress) -> list[Plan]:
    """The plans with the steps that the budget pays for, validated and saved at even distances."""
    ((kind, amount),) = sweep.budget.given.items()
    seconds = seconds_per_step(Path(sweep.output), plans, progress) if kind == "seconds" else {}
    result = []
    for plan in plans:
        name, tokens = plan.row.name, float(plan.tokens_per_step)
        costs = {"tokens": tokens, "flops": tokens * plan.flops_per_token, "seconds": seconds.get(plan.speed_name, 0.0)}
        count = int(amount / costs[kind] * (1 + 1e-12))  # 2 s have twenty steps of 0.1 s
        if count > MOST_STEPS:
            raise InputError(
                f"budget.{kind}: {amount:g} given, but that is {count:.3g} steps for rows.{name}; give less, so that "
                f"it is at most {MOST_STEPS:,}"
            )
        shortest = round(sweep.trial_share * count) if sweep.stages else count
        if shortest <= (warmup := plan.recipe.schedule.warmup_steps or 0):
            trial = "" if shortest == count else " of a trial"
            raise InputError(
                f"budget.{kind}: {amount:g} given, but that is {plural(shortest, 'step')}{trial} for rows.{name}, not "
                f"more than its warm-up of {warmup}; give more, or a smaller schedule.warmup_steps or batch"
            )
        defaults: dict[str, Any] = {
            "eval_every_steps": max(1, count // VALIDATIONS),
            "save_every_steps": max(1, count // CHECKPOINTS),
            "log_every_steps": max(1, min(10, count // 20)),
            "keep_checkpoints": 1,
        }
        own = {field: value for field, value in defaults.items() if field not in plan.row.stated.get("training", {})}
        training = dataclasses.replace(plan.recipe.training, max_steps=count, minutes=None, **own)
        result.append(dataclasses.replace(plan, recipe=dataclasses.replace(plan.recipe, training=training)))
    return result
