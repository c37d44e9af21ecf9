"""Fields of recipes as nested dictionaries, written dotted or nested, and laid over each other."""

import copy
from collections.abc import Mapping
from typing import Any

from multilin.errors import InputError

Values = dict[str, Any]

_DECIDED = {
    "training.max_steps": "the budget decides the number of steps",
    "training.seed": "give `seeds`",
    "output": "runs go into folders of the sweep's `output`",
}
# What belongs to a choice and means nothing beside another one.
_BELONGS_TO = {
    "model.architecture": ("model.options", "model.layers", "model.config"),
    "model.layers": ("model.options", "model.num_layers"),
    "tokenizer.kind": ("tokenizer.vocab_size", "tokenizer.path"),
    "optimizer.name": ("optimizer.betas", "optimizer.row_average", "optimizer.row_order"),
    "schedule.name": ("schedule.tail", "schedule.constant_steps"),
}


def merge(values: Values, other: Mapping[str, Any]) -> Values:
    """Nested values with those of another over them; what belonged to a choice that changes is left out.

    Values that name an architecture are a whole recipe, in which every choice was made.
    """
    merged = copy.deepcopy(values)
    is_whole = get(values, "model.architecture") is not None
    for chosen, belonging in _BELONGS_TO.items():
        choice, before = get(other, chosen), get(values, chosen)
        if choice is not None and choice != before and (is_whole or before is not None):
            for dotted in belonging:
                section, name = dotted.split(".")
                merged.get(section, {}).pop(name, None)
    return _merged(merged, other)


def _merged(values: Values, other: Mapping[str, Any]) -> Values:
    for name, value in other.items():
        if isinstance(value, Mapping):
            inner = values.get(name)
            values[name] = _merged(inner if isinstance(inner, dict) else {}, value)
        else:
            values[name] = copy.deepcopy(value)
    return values


def nested(values: Mapping[str, Any], where: str) -> Values:
    """Dotted names as nested dictionaries.

    Raises:
        InputError: a field that the sweep decides.
    """
    found: Values = {}
    for dotted, value in values.items():
        for part in reversed(str(dotted).split(".")):
            value = {part: value}
        found = _merged(found, value)
    for dotted, reason in _DECIDED.items():
        if get(found, dotted) is not None:
            name = f"--{dotted}" if where == "--" else f"{where}.{dotted}"
            raise InputError(f"{name}: {get(found, dotted)!r} given, but {reason}")
    return found


def get(values: Mapping[str, Any], dotted: str) -> Any:
    """The value of a dotted name; None where there is none."""
    inner: Any = values
    for part in dotted.split("."):
        inner = inner.get(part) if isinstance(inner, Mapping) else None
    return inner
