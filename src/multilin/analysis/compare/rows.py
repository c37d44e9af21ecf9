"""The rows of a sweep, each with its whole recipe, and a row with one choice of what is tuned.

A row's recipe is what it starts from, the base over that, and the row over both.
"""

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from multilin.analysis.compare.sweep import Sweep, builtin_sweep, nested
from multilin.data.tasks import is_task
from multilin.errors import InputError, nearest, prefixed, shown
from multilin.model.factory import model_names
from multilin.settings import load_settings
from multilin.training.fields import Values, get, merge
from multilin.training.recipe import Recipe, check_fields_of_start, check_start, load_recipe
from multilin.training.resolve import resolve_recipe

LONGEST_PART = 60  # characters of a value in the name of a folder

Choice = Mapping[str, Any]  # fields of all stages of tuning to one value each


@dataclasses.dataclass(frozen=True)
class Row:
    """One model of a comparison.

    recipe: without seed, steps and folder, which each run adds.
    stated: the fields that the sweep itself gives, nested.
    """

    name: str
    recipe: Recipe
    stated: Values

    def with_choice(self, choice: Choice) -> Recipe:
        """The row's recipe, with every default filled in, and other values of some fields.

        Raises:
            InputError: an unknown field or a wrong value.
        """
        given = nested(choice, "stages")
        recipe = load_settings(Recipe, merge(dataclasses.asdict(self.recipe), given), "stages")
        check_fields_of_start(recipe, given)
        return resolve_recipe(recipe)

    def first_choice(self, sweep: Sweep) -> Choice:
        """The row's own values of the fields that are tuned.

        Raises:
            InputError: adapters are tuned, and the row has none.
        """
        recipe = self.with_choice({})
        names = [name for stage in sweep.stages for name in stage]
        if recipe.training.lora is None and (given := [name for name in names if name.startswith("training.lora.")]):
            raise InputError(
                f"stages.{given[0]}: given, but the row has no training.lora; begin it with a recipe that has, or take "
                "the row out"
            )
        own = dataclasses.asdict(recipe)
        return {name: get(own, name) for name in names}


@dataclasses.dataclass(frozen=True)
class Plan:
    """A row with one choice, ready to be trained.

    recipe: resolved, with the steps of the budget.
    parameters, embedding_parameters: all, and those in embeddings and the output projection.
    flops_per_token: of training, see `training_flops_per_token`.
    text: hash of the prepared text and tokenizer; rows that share it can be compared token by token.
    remarks: for the reader of the report.
    is_trial: whether it has only the trial's share of the budget.
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
        """The same with a share of the steps, validated and saved at its end; with all of them it is the run itself."""
        if share == 1:
            return self
        steps = max(1, round(share * self.recipe.training.num_steps))
        training = dataclasses.replace(
            self.recipe.training, max_steps=steps, eval_every_steps=steps, save_every_steps=steps
        )
        recipe = dataclasses.replace(self.recipe, training=training)
        return dataclasses.replace(self, recipe=recipe, is_trial=True)

    def run(self, output: str, seed: int) -> Recipe:
        """The recipe of one run, in its folder: OUTPUT/ROW-sSEED, the values of the choice behind it, and `trial`."""
        training = dataclasses.replace(self.recipe.training, seed=seed)
        parts = [self.row.name, f"s{seed}", *_parts(self.choice)] + (["trial"] if self.is_trial else [])
        folder = Path(output, "-".join(parts))
        return dataclasses.replace(self.recipe, training=training, output=str(folder))

    @property
    def speed_name(self) -> str:
        """What the plan is called in speed.json: numbers of the optimizer and the schedule do not change the cost."""
        free = ("optimizer", "schedule")
        costly = {
            name: v for name, v in self.choice.items() if name == "optimizer.name" or name.split(".")[0] not in free
        }
        return "-".join([self.row.name, *_parts(costly)])


def rows_of(sweep: Sweep) -> list[Row]:
    """Every row with its whole recipe.

    Raises:
        InputError: an unknown field or recipe, a wrong value, or a field that the sweep decides.
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
                f"{where}.model.start: {shown(folder)} given, but rows take it from a recipe; write it into a file, "
                "and give that as `recipe`"
            )
        source = get(stated, "data.source")
        if sweep.task is not None and source != f"task:{sweep.task}":
            raise InputError(
                f"rows.{name}.data.source: {shown(source)} given beside the task {sweep.task}; leave one of them out"
            )
        recipe = stated.pop("recipe", None)
        start = _start(name, recipe, stated, sweep.task)
        rows.append(Row(name, load_settings(Recipe, merge(start, stated), f"rows.{name}"), stated))
        check_start(rows[-1].recipe)
        with prefixed(f"rows.{name}."):
            check_fields_of_start(rows[-1].recipe, stated)
        if sweep.task is None and is_task(source := rows[-1].recipe.data.name):
            raise InputError(f"rows.{name}.data.source: {source} is a task; give `task` in the sweep, or --task")
    return rows


def _start(name: str, recipe: Any, stated: Values, task: str | None) -> Values:
    """The values that the base and the row change."""
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
    """A choice as parts of the name of a folder."""
    parts = []
    for name, value in choice.items():
        short = f"{value:g}" if isinstance(value, float) else str(value)
        text = short if not isinstance(value, float) or float(short) == value else repr(value)
        text = "".join(c if c.isalnum() or c in ".+-" else "_" for c in text)
        if len(text) > LONGEST_PART:
            text = f"{text[:LONGEST_PART]}-{hashlib.blake2b(str(value).encode(), digest_size=4).hexdigest()}"
        parts.append(name.split(".")[-1].replace("learning_rate", "lr") + text)
    return parts
