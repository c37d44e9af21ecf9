"""Dotted fields of a recipe, in a sweep file or as flags, as nested dictionaries."""

from collections.abc import Mapping
from typing import Any

from multilin.errors import InputError
from multilin.training.fields import Values, get, nest

_DECIDED = {
    "training.max_steps": "the budget decides the number of steps",
    "training.minutes": "the budget decides how long a run is",
    "training.seed": "give `seeds`",
    "output": "runs go into folders of the sweep's `output`",
}


def nested(values: Mapping[str, Any], where: str) -> Values:
    """Dotted names as nested dictionaries; `where` in the sweep file they stand, or `--` for flags, is for messages.

    Raises:
        InputError: a field that the sweep decides.
    """
    result = nest(values)
    for dotted, reason in _DECIDED.items():
        if (given := get(result, dotted)) is not None:
            name = f"--{dotted}" if where == "--" else f"{where}.{dotted}"
            raise InputError(f"{name}: {given!r} given, but {reason}")
    return result
