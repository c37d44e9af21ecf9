"""Rows of a sweep with their whole recipes: what a row begins with, the base over it, and the row over both."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from multilin.analysis.compare.sweep import Sweep, builtin_sweep
from multilin.analysis.compare.values import Values, get, merge, nested
from multilin.errors import InputError, nearest, shown
from multilin.model.factory import model_names
from multilin.settings import load_settings
from multilin.training.recipe import Recipe, load_recipe


@dataclasses.dataclass(frozen=True)
class Row:
    """One model of a comparison.

    recipe: without what a run adds: seed, steps, folder.
    stated: the fields that the sweep itself gives, nested.
    """

    name: str
    recipe: Recipe
    stated: Values


def rows_of(sweep: Sweep) -> list[Row]:
    """Every row with its whole recipe.

    Raises:
        InputError: an unknown field or recipe, a wrong value, or a field that the sweep decides.
    """
    base = nested(sweep.base, "base")
    if sweep.task is not None:
        base = merge(base, {"data": {"source": f"task:{sweep.task}"}})
    found = []
    for name, given in sweep.rows.items():
        stated = merge(base, nested(given or {}, f"rows.{name}"))
        start = _start(name, stated.pop("recipe", None), stated, sweep.task)
        found.append(Row(name, load_settings(Recipe, merge(start, stated), f"rows.{name}"), stated))
    return found


def with_choice(row: Row, choice: Mapping[str, Any]) -> Recipe:
    """The row's recipe with values of the grid.

    Raises:
        InputError: an unknown field or a wrong value.
    """
    values = merge(dataclasses.asdict(row.recipe), nested(choice, "grid"))
    return load_settings(Recipe, values, "grid")


def _start(name: str, recipe: Any, stated: Values, task: str | None) -> Values:
    """What the base and the row change."""
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
    row = known.rows.get(name) or {}
    return merge(nested(known.base, "base"), merge({"model": {"architecture": name}}, nested(row, f"rows.{name}")))
