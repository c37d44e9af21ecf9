"""The rows of a sweep, and their plans: recipes with values of the tuned fields and as many steps as the budget allows.

A row starts from a recipe. First the sweep's base and then the row's own fields replace fields of the recipe.
"""

import dataclasses
import hashlib
import statistics
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from multilin.analysis.compare.sweep import Sweep, builtin_sweep, choices_of, nested
from multilin.analysis.costs import parameter_counts, training_flops_per_token
from multilin.architectures.own_file import resolve_fields
from multilin.data.tasks import is_task
from multilin.errors import InputError, nearest, plural, prefixed, shown
from multilin.files import write_whole
from multilin.model.factory import model_names
from multilin.settings import load_settings
from multilin.settings.bounds import MOST_STEPS, Amount
from multilin.settings.inputs import read_json, to_json
from multilin.training.assemble import build_model, check_model, packing_remark, read_data
from multilin.training.fields import Values, get, merge
from multilin.training.loop import train
from multilin.training.outcomes import TrainingFailed, TrainingInterrupted
from multilin.training.progress import TrainingProgress
from multilin.training.recipe import Recipe, check_fields_of_start, check_start, load_recipe
from multilin.training.resolve import resolve_recipe
from multilin.training.run_folder import RunFolder

VALIDATIONS, CHECKPOINTS = 10, 4  # numbers in a run, unless the sweep gives others
SPEED_FILE = "speed.json"
MEASURED_STEPS, WARM_UP_STEPS, MEASURED_TURNS = 20, 5, 3
_WARM_UP = "schedule.warmup_steps"
LONGEST_PART = 60  # characters of a value in the name of a folder
Choice = Mapping[str, Any]  # all tuned fields, with one value each


@dataclasses.dataclass(frozen=True)
class Row:
    """One model of a comparison.

    values: nested fields of its recipe, without seed, steps and folder, which are set for each run.
    recipe: the recipe of these fields, with defaults for all others.
    stated: the fields that the sweep itself gives, nested.
    """

    name: str
    values: Values
    recipe: Recipe
    stated: Values

    def with_choice(self, choice: Choice) -> Recipe:
        """The row's recipe with the values of a choice and every default filled in.

        Raises:
            InputError: an unknown field or a wrong value.
        """
        if not choice:
            return resolve_recipe(self.recipe)
        given = nested(choice, "stages")
        recipe = load_settings(Recipe, merge(self.values, given), "stages")
        check_fields_of_start(recipe, given)
        return resolve_recipe(recipe)

    def first_choice(self, sweep: Sweep) -> Choice:
        """The row's own values of the fields that are tuned.

        Raises:
            InputError: adapters are tuned, and the row has none.
        """
        recipe = self.with_choice({})
        names = [name for stage in sweep.stages_of(self.name) for name in stage]
        if recipe.training.lora is None and (given := [name for name in names if name.startswith("training.lora.")]):
            raise InputError(
                f"stages.{given[0]}: given, but the row has no adapters (training.lora); start the row from a recipe "
                "with training.lora, or leave the row out"
            )
        own = dataclasses.asdict(recipe)
        return {name: get(own, name) for name in names}


@dataclasses.dataclass(frozen=True)
class Plan:
    """A row with a choice (one value for each tuned field), ready to be trained.

    recipe: the resolved recipe, with as many steps as the budget allows.
    parameters, embedding_parameters: number of all parameters, and number of parameters in embeddings and output.
    flops_per_token: training FLOPs per token, see `training_flops_per_token`.
    text: hash of the prepared text and tokenizer; rows that share it can be compared token by token.
    remarks: sentences for the reader of the report.
    is_trial: whether the plan is a trial, which has only a share of the steps.
    """

    row: Row
    choice: Choice
    recipe: Recipe
    parameters: int
    embedding_parameters: int
    flops_per_token: float
    text: str
    remarks: list[str]
    is_trial: bool = False

    @property
    def tokens_per_step(self) -> int:
        """Training tokens of a step."""
        training = self.recipe.training
        return (training.global_batch_size or training.batch_size) * self.recipe.model.n_positions

    def trial(self, share: float) -> "Plan":
        """The plan of a trial: this share of the steps, validated and saved at the end. Share 1 returns this plan.

        The warm-up takes at most half of the steps of a trial, unless its length is tuned.
        """
        if share == 1:
            return self
        steps = max(1, round(share * self.recipe.training.num_steps))
        training = dataclasses.replace(
            self.recipe.training, max_steps=steps, eval_every_steps=steps, save_every_steps=steps
        )
        schedule = self.recipe.schedule
        if _WARM_UP not in self.choice:
            schedule = dataclasses.replace(schedule, warmup_steps=min(schedule.warmup_steps or 0, steps // 2))
        recipe = dataclasses.replace(self.recipe, training=training, schedule=schedule)
        return dataclasses.replace(self, recipe=recipe, is_trial=True)

    def run(self, output: str, seed: int) -> Recipe:
        """The recipe of one run. The run's folder is OUTPUT/ROW-sSEED-CHOICE, followed by `-trial` for a trial."""
        training = dataclasses.replace(self.recipe.training, seed=seed)
        parts = [self.row.name, f"s{seed}", *_parts(self.choice)] + (["trial"] if self.is_trial else [])
        folder = Path(output, "-".join(parts))
        return dataclasses.replace(self.recipe, training=training, output=str(folder))

    @property
    def speed_name(self) -> str:
        """The name in speed.json. Fields of optimizer and schedule that do not change the speed are left out."""
        free = ("optimizer", "schedule")
        costly = {
            name: v for name, v in self.choice.items() if name == "optimizer.name" or name.split(".")[0] not in free
        }
        return "-".join([self.row.name, *_parts(costly)])


def rows_of(sweep: Sweep) -> list[Row]:
    """Return every row of a sweep with its whole recipe.

    Raises:
        InputError: an unknown field or recipe, a wrong value, or a field that only the sweep may set.
    """
    base = nested(sweep.base, "base")
    if sweep.task is not None:
        base = merge(base, {"data": {"source": f"task:{sweep.task}"}})
    if sweep.final_half:
        base = merge(base, {"data": {"validation_part": "tuning"}})
    rows = []
    for name, given in sweep.rows.items():
        stated = merge(base, nested(given or {}, f"rows.{name}"))
        if (folder := get(stated, "model.start")) is not None:
            where = "base" if get(base, "model.start") == folder else f"rows.{name}"
            raise InputError(
                f"{where}.model.start: {shown(folder)} given, but only a recipe file can set this field; write one, "
                "and give it as `recipe`"
            )
        source = get(stated, "data.source")
        if sweep.task is not None and source != f"task:{sweep.task}":
            raise InputError(
                f"rows.{name}.data.source: {shown(source)} given with the task {sweep.task}; leave out one of them"
            )
        with prefixed(f"rows.{name}."):
            if isinstance(model := stated.get("model"), Mapping):
                stated |= {"model": resolve_fields(model, is_typed=True)}
        recipe = stated.pop("recipe", None)
        values = merge(_start(name, recipe, stated, sweep.task), stated)
        rows.append(Row(name, values, load_settings(Recipe, values, f"rows.{name}"), stated))
        check_start(rows[-1].recipe)
        with prefixed(f"rows.{name}."):
            check_fields_of_start(rows[-1].recipe, stated)
        if sweep.task is None and is_task(source := rows[-1].recipe.data.name):
            raise InputError(f"rows.{name}.data.source: {source} is a task; give it as the sweep's `task`, or --task")
    return rows


def _start(name: str, recipe: Any, stated: Values, task: str | None) -> Values:
    """The values that a row starts from, before the base and the row replace some of them."""
    if recipe is not None:
        if not isinstance(recipe, str):
            raise InputError(
                f"rows.{name}.recipe: {shown(recipe)} given, but it should be the name or path of a recipe"
            )
        return dataclasses.asdict(load_recipe(recipe))
    if get(stated, "model.architecture") or get(stated, "model.layers"):
        return {}
    if name not in model_names():
        raise InputError(
            f"rows.{name}: no model given; give `recipe`, `model.architecture` or `model.layers`, or name the row "
            f"after a model: {', '.join(model_names())}{nearest(name, model_names())}"
        )
    known = builtin_sweep(task)
    row = merge({"model": {"architecture": name}}, nested(known.rows.get(name) or {}, f"rows.{name}"))
    return merge(nested(known.base, "base"), row)


def _parts(choice: Choice) -> list[str]:
    """The parts of a run folder's name that show the values of a choice."""
    parts = []
    for name, value in choice.items():
        short = f"{value:g}" if isinstance(value, float) else str(value)
        text = short if not isinstance(value, float) or float(short) == value else repr(value)
        text = "".join(c if c.isalnum() or c in ".+-" else "_" for c in text)
        if len(text) > LONGEST_PART:
            text = f"{text[:LONGEST_PART]}-{hashlib.blake2b(str(value).encode(), digest_size=4).hexdigest()}"
        parts.append(name.split(".")[-1].replace("learning_rate", "lr") + text)
    return parts


def plan_rows(sweep: Sweep, progress: TrainingProgress) -> list[Plan]:
    """Plan all rows before tuning, with each row's own values of the tuned fields.

    Raises:
        InputError: a row that cannot be trained; the message names it.
    """
    plans = []
    for row in rows_of(sweep):
        with prefixed(f"rows.{row.name}: ", f"rows.{row.name}."):
            first = row.first_choice(sweep)
            for choice in [choice for stage in sweep.stages_of(row.name) for choice in choices_of(stage, first)]:
                check_model(row.with_choice(choice))
            plans.append(_plan(row, first, progress))
    return _with_budget(sweep, plans, progress)


def plan_choice(sweep: Sweep, plan: Plan, choice: Choice, progress: TrainingProgress) -> Plan:
    """Plan the same row with another choice.

    Raises:
        InputError: the choice cannot be trained.
    """
    other = dataclasses.replace(plan, choice=choice)
    if other.speed_name != plan.speed_name:
        (planned,) = _with_budget(sweep, [_plan(plan.row, choice, progress)], progress)
        return planned
    recipe = dataclasses.replace(plan.row.with_choice(choice), training=plan.recipe.training)
    steps = round((sweep.trial_share if _WARM_UP in choice else 1) * recipe.training.num_steps)
    if (warmup := recipe.schedule.warmup_steps or 0) >= steps:
        raise InputError(f"schedule.warmup_steps: {warmup} given, but a trial has {plural(steps, 'step')}; give fewer")
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
    """The plans with as many steps as the budget allows, and with validations and checkpoints at equal intervals."""
    ((kind, amount),) = sweep.budget.given.items()
    seconds = seconds_per_step(Path(sweep.output), plans, progress) if kind == "seconds" else {}
    result = []
    for plan in plans:
        name, tokens = plan.row.name, float(plan.tokens_per_step)
        costs = {"tokens": tokens, "flops": tokens * plan.flops_per_token, "seconds": seconds.get(plan.speed_name, 0.0)}
        count = int(amount / costs[kind] * (1 + 1e-12))  # rounding errors aside: 20 steps of 0.1 s fit into 2 s
        if count > MOST_STEPS:
            raise InputError(
                f"budget.{kind}: {amount:g} given, but that is {count:.3g} steps for rows.{name}, more than "
                f"{MOST_STEPS:,}; give less"
            )
        shortest = round(sweep.trial_share * count) if _WARM_UP in plan.choice else count
        if shortest <= (warmup := plan.recipe.schedule.warmup_steps or 0):
            trial = "run" if shortest == count else "trial"
            raise InputError(
                f"budget.{kind}: {amount:g} given, but then a {trial} of rows.{name} has {plural(shortest, 'step')}, "
                f"and its warm-up takes {warmup}; give more, or a smaller schedule.warmup_steps or batch"
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


def seconds_per_step(output: Path, plans: list[Plan], progress: TrainingProgress) -> dict[str, float]:
    """The median seconds of a step, by `speed_name`. A resumed comparison reads them, so its steps are the same."""
    path = output / SPEED_FILE
    speeds = read_speeds(path) if path.is_file() else {}
    times: dict[str, list[float]] = {}
    for _ in range(MEASURED_TURNS):  # in turns, so that a busy minute slows every row
        for plan in plans:
            if (name := plan.speed_name) not in speeds:
                progress.message(f"measuring the speed of {name}")
                times.setdefault(name, []).extend(_step_times(plan))
    speeds |= {name: statistics.median(seconds) for name, seconds in times.items()}
    write_whole(path, to_json(speeds, indent=1) + "\n")
    return speeds


def read_speeds(path: Path) -> dict[str, float]:
    """The seconds per step of rows by name, from speed.json.

    Raises:
        InputError: the file is damaged.
    """
    try:
        return TypeAdapter(dict[str, Amount]).validate_python(read_json(path, "output"))
    except ValueError as error:  # an error of pydantic, or an InputError of read_json
        raise InputError(f"output: {path} is damaged; delete it, and the speeds are measured again") from error


def _step_times(plan: Plan) -> list[float]:
    """Measure the seconds of each step in a short run, which does not fail if the loss is not finite.

    Raises:
        TrainingInterrupted: SIGINT or SIGTERM.
    """
    optimizer = dataclasses.replace(plan.recipe.optimizer, nonfinite="skip")
    with tempfile.TemporaryDirectory(prefix="multilin-") as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* is not finite")
        training = dataclasses.replace(
            plan.recipe.training, max_steps=MEASURED_STEPS, minutes=None, log_every_steps=1, eval_every_steps=0,
            eval_max_tokens=1, save_every_steps=0,
        )  # fmt: skip
        output = Path(folder, "run")
        try:
            train(dataclasses.replace(plan.recipe, optimizer=optimizer, training=training, output=str(output)))
        except TrainingInterrupted as stop:
            raise TrainingInterrupted(
                f"stopped while the speed of {plan.speed_name} was measured; the same command measures it again",
                stop.exit_code - 128,
            ) from None
        except TrainingFailed:  # raised after the last step if the loss is not finite
            if len(RunFolder(output).read_metrics()) < MEASURED_STEPS:
                raise
        lines = RunFolder(output).read_metrics()[WARM_UP_STEPS:]
    return [plan.tokens_per_step / line["tokens_per_second"] for line in lines]
