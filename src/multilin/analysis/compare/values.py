"""Fields of a recipe as nested or dotted dictionaries: one over another, in a sweep file or as flags."""

import copy
from collections.abc import Mapping
from typing import Any

from multilin.errors import InputError

_DECIDED = {
    "training.max_steps": "the budget decides the number of steps",
    "training.minutes": "the budget decides how long a run is",
    "training.seed": "give `seeds`",
    "output": "runs go into folders of the sweep's `output`",
}
_DEPENDENT = {  # field to the fields that only apply to its current value
    "model.architecture": ("model.options", "model.layers", "model.config"),
    "model.layers": ("model.options", "model.num_layers"),
    "tokenizer.kind": ("tokenizer.vocab_size", "tokenizer.path"),
    "tokenizer.path": ("tokenizer.kind", "tokenizer.vocab_size"),
    "optimizer.name": ("optimizer.betas", "optimizer.row_average", "optimizer.row_order"),
    "schedule.name": ("schedule.tail", "schedule.constant_steps"),
}

Values = dict[str, Any]


def merge(values: Values, other: Mapping[str, Any]) -> Values:
    """Nested values with another's over them, without the fields that depended on a choice which changes.

    Values with an architecture count as a complete recipe.
    """
    kept = copy.deepcopy(values)
    is_whole = get(values, "model.architecture") is not None
    for name, dependent in _DEPENDENT.items():
        choice, before = get(other, name), get(values, name)
        if choice is not None and choice != before and (is_whole or before is not None):
            for dotted in dependent:
                section, field = dotted.split(".")
                kept.get(section, {}).pop(field, None)
    return _overlay(kept, other)


def nested(values: Mapping[str, Any], where: str) -> Values:
    """Dotted names as nested dictionaries; `where` in the sweep file they stand, or `--` for flags, is for messages.

    Raises:
        InputError: a field that the sweep decides.
    """
    result: Values = {}
    for dotted, value in values.items():
        for part in reversed(str(dotted).split(".")):
            value = {part: value}
        result = _overlay(result, value)
    for dotted, reason in _DECIDED.items():
        if (given := get(result, dotted)) is not None:
            name = f"--{dotted}" if where == "--" else f"{where}.{dotted}"
            raise InputError(f"{name}: {given!r} given, but {reason}")
    return result


def get(values: Mapping[str, Any], dotted: str) -> Any:
    """The value of a dotted name; None where there is none."""
    inner: Any = values
    for part in dotted.split("."):
        inner = inner.get(part) if isinstance(inner, Mapping) else None
    return inner


def _overlay(values: Any, other: Mapping[str, Any]) -> Values:
    below = values if isinstance(values, Mapping) else {}
    inner = {name: _overlay(below.get(name), v) if isinstance(v, Mapping) else v for name, v in other.items()}
    return {**below, **inner}
