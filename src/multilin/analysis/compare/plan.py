"""From a sweep to the runs it consists of: every budget becomes a number of steps, every mistake is found first."""

import dataclasses
import json
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import MaxLen

from multilin.analysis.compare.flops import training_flops_per_token
from multilin.analysis.compare.rows import Row, rows_of, with_choice
from multilin.analysis.compare.sweep import Sweep
from multilin.errors import InputError, plural
from multilin.files import write_whole
from multilin.settings import load_settings, settings
from multilin.settings.bounds import MOST_STEPS, Amount, Name
from multilin.settings.inputs import read_json
from multilin.training.assemble import build_model, check_model, packing_remark, read_data
from multilin.training.progress import TrainingProgress
from multilin.training.recipe import Recipe
from multilin.training.resolve import resolve_recipe
from multilin.training.run_folder import RunFolder
from multilin.training.trainer import train

SPEED_FILE = "speed.json"
MEASURED_STEPS, WARM_UP_STEPS, MEASURED_TURNS = 20, 5, 2
VALIDATIONS, CHECKPOINTS = 10, 4  # of a run, where the sweep says nothing else

Choice = Mapping[str, Any]


@settings
class _Speeds:
    """What SPEED_FILE holds."""

    seconds: Annotated[dict[Name, Amount], MaxLen(100)]  # of a training step, by row


@dataclasses.dataclass(frozen=True)
class Plan:
    """A row ready to be trained.

    recipe: resolved, with the steps of the budget.
    parameters, embedding_parameters: all, and those in embeddings and the output projection.
    flops_per_token: of training, see `training_flops_per_token`.
    text: hash of the prepared text and tokenizer; rows that share it can be compared token by token.
    remarks: what must be known to judge the row.
    """

    row: Row
    recipe: Recipe
    parameters: int
    embedding_parameters: int
    flops_per_token: float
    text: str
    remarks: list[str]

    @property
    def tokens_per_step(self) -> int:
        """Training tokens of a step."""
        return tokens_per_step(self.recipe)

    def run(self, output: str, seed: int, choice: Choice) -> Recipe:
        """The recipe of one run of the row, in its folder."""
        recipe = self.recipe
        if choice:
            chosen = resolve_recipe(with_choice(self.row, choice))
            recipe = dataclasses.replace(chosen, training=self.recipe.training)
        training = dataclasses.replace(recipe.training, seed=seed)
        return dataclasses.replace(recipe, training=training, output=run_path(output, self.row.name, seed, choice))


def run_path(output: str, row: str, seed: int, choice: Choice) -> str:
    """The folder of a run: OUTPUT/ROW-sSEED, and the values of the grid if there is one."""
    short = {"learning_rate": "lr"}
    parts = [
        f"{short.get(name.split('.')[-1], name.split('.')[-1])}{_in_a_name(value)}" for name, value in choice.items()
    ]
    return str(Path(output, "-".join([row, f"s{seed}", *parts])))


def tokens_per_step(recipe: Recipe) -> int:
    """Training tokens of a step on one device."""
    plan = recipe.training
    return plan.batch_size * plan.gradient_accumulation * recipe.model.n_positions


def plan_rows(sweep: Sweep, progress: TrainingProgress) -> list[Plan]:
    """Everything that is known before training.

    Raises:
        InputError: a row that cannot be trained; it is named.
    """
    plans = []
    for row in rows_of(sweep):
        try:
            for choice in sweep.choices:
                check_model(resolve_recipe(with_choice(row, choice)))
            plans.append(_plan(row, progress))
        except InputError as error:
            raise InputError(f"rows.{row.name}: {str(error).removeprefix(f'rows.{row.name}.')}") from None
    steps = _steps(sweep, plans, progress)
    return [
        dataclasses.replace(plan, recipe=_with_steps(plan, max_steps))
        for plan, max_steps in zip(plans, steps, strict=True)
    ]


def _plan(row: Row, progress: TrainingProgress) -> Plan:
    recipe = resolve_recipe(row.recipe)
    check_model(recipe)
    text = read_data(recipe, progress.prepare)
    check_model(recipe, len(text.tokenizer))
    with torch.random.fork_rng():
        model = build_model(recipe, text)
    embeddings = [model.get_input_embeddings(), model.get_output_embeddings()]
    embeddings += [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    shared = {id(p): p.numel() for module in embeddings if module is not None for p in module.parameters()}
    remark = packing_remark(recipe, model)
    return Plan(
        row,
        recipe,
        parameters=sum(p.numel() for p in model.parameters()),
        embedding_parameters=sum(shared.values()),
        flops_per_token=training_flops_per_token(model, recipe.model.n_positions),
        text=text.identity,
        remarks=[remark] if remark else [],
    )


def _steps(sweep: Sweep, plans: list[Plan], progress: TrainingProgress) -> list[int]:
    budget = sweep.budget
    if budget.kind == "tokens":
        steps = [int(budget.amount // plan.tokens_per_step) for plan in plans]
    elif budget.kind == "flops":
        steps = [int(budget.amount // (plan.flops_per_token * plan.tokens_per_step)) for plan in plans]
    else:
        seconds = _seconds_per_step(Path(sweep.output), plans, progress)
        steps = [int(budget.amount // seconds[plan.row.name]) for plan in plans]
    for plan, count in zip(plans, steps, strict=True):
        if count > MOST_STEPS:
            raise InputError(
                f"budget.{budget.kind}: {budget.amount:g} given, but that is {count:.3g} steps for "
                f"rows.{plan.row.name}; give less, so that it is at most {MOST_STEPS:,}"
            )
        warmup = plan.recipe.schedule.warmup_steps or 0
        if count <= warmup:
            raise InputError(
                f"budget.{budget.kind}: {budget.amount:g} given, but that is {plural(count, 'step')} for "
                f"rows.{plan.row.name}, not more than its warm-up of {warmup}; give more, or a "
                "smaller schedule.warmup_steps or batch"
            )
    return steps


def _with_steps(plan: Plan, max_steps: int) -> Recipe:
    stated = plan.row.stated.get("training", {})
    defaults: dict[str, Any] = {
        "eval_every_steps": max(1, max_steps // VALIDATIONS),
        "save_every_steps": max(1, max_steps // CHECKPOINTS),
        "log_every_steps": max(1, min(10, max_steps // 20)),
        "keep_checkpoints": 1,
    }
    own = {name: value for name, value in defaults.items() if name not in stated}
    return dataclasses.replace(
        plan.recipe, training=dataclasses.replace(plan.recipe.training, max_steps=max_steps, **own)
    )


def _seconds_per_step(output: Path, plans: list[Plan], progress: TrainingProgress) -> dict[str, float]:
    """Median seconds of a training step, by row; measured once, so that a resumed comparison has the same steps."""
    path = output / SPEED_FILE
    known = read_speeds(path) if path.is_file() else {}
    missing = [plan for plan in plans if plan.row.name not in known]
    times: dict[str, list[float]] = {plan.row.name: [] for plan in missing}
    for _ in range(MEASURED_TURNS):  # in turns, so that a busy minute does not fall on one row
        for plan in missing:
            progress.message(f"measuring the speed of {plan.row.name}")
            times[plan.row.name] += _step_times(plan)
    known |= {name: statistics.median(found) for name, found in times.items()}
    write_whole(path, json.dumps(known, indent=1) + "\n")
    return known


def read_speeds(path: Path) -> dict[str, float]:
    """The seconds per step of rows by name, from speed.json.

    Raises:
        InputError: the file is damaged.
    """
    try:
        return dict(load_settings(_Speeds, {"seconds": read_json(path, "output")}).seconds)
    except InputError as error:
        raise InputError(f"output: {path} is damaged; delete it, and the speeds are measured again") from error


def _step_times(plan: Plan) -> list[float]:
    """Seconds of single steps of a short run."""
    short: dict[str, Any] = {
        "max_steps": MEASURED_STEPS,
        "log_every_steps": 1,
        "eval_every_steps": 0,
        "save_every_steps": 0,
    }
    training = dataclasses.replace(plan.recipe.training, eval_max_tokens=1, **short)
    with tempfile.TemporaryDirectory(prefix="multilin-") as folder:
        train(dataclasses.replace(plan.recipe, training=training, output=str(Path(folder, "run"))))
        lines = RunFolder(Path(folder, "run")).read_metrics()[WARM_UP_STEPS:]
    return [plan.tokens_per_step / line["tokens_per_second"] for line in lines]


def _in_a_name(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return "".join(character if character.isalnum() or character in ".+-" else "_" for character in text)
