"""Merges fields of recipes. The fields are nested dictionaries (in files) or have dotted names (as flags)."""

import copy
from collections.abc import Iterable, Mapping
from typing import Any

_DEPENDENT: dict[str, tuple[str, ...]] = {  # a change of this field drops these fields
    "model.architecture": ("model.options", "model.layers", "model.config", "optimizer.learning_rate"),
    "model.layers": ("model.options", "model.num_layers"),
    "tokenizer.kind": ("tokenizer.vocab_size", "tokenizer.path"),
    "tokenizer.path": ("tokenizer.kind", "tokenizer.vocab_size"),
    "optimizer.name": (
        "optimizer.learning_rate",
        "optimizer.weight_decay",
        "optimizer.clip_norm",
        "optimizer.betas",
        "optimizer.row_average",
    ),
    "schedule.name": ("schedule.tail", "schedule.constant_steps"),
    "training.max_steps": ("training.minutes",),
    "training.minutes": ("training.max_steps",),
}
_OF_ARCHITECTURE = ("optimizer.name", "schedule.name")  # the architecture decides these if they are not given

Values = dict[str, Any]


def get(values: Mapping[str, Any], dotted: str) -> Any:
    """The value of a dotted name, or None if there is none."""
    inner: Any = values
    for part in dotted.split("."):
        inner = inner.get(part) if isinstance(inner, Mapping) else None
    return inner


def put(values: Values, dotted: str, value: Any) -> None:
    """Set a dotted name in nested values, in place; missing sections are created."""
    *sections, name = dotted.split(".")
    for section in sections:
        held = values.get(section)
        values[section] = dict(held) if isinstance(held, dict) else {}
        values = values[section]
    values[name] = value


def nest(values: Mapping[str, Any]) -> Values:
    """Turn dotted names into nested dictionaries."""
    result: Values = {}
    for dotted, value in values.items():
        for part in reversed(str(dotted).split(".")):
            value = {part: value}
        result = overlay(result, value)
    return result


def flatten(values: Mapping[str, Any], prefix: str = "") -> Values:
    """Turn nested dictionaries into dotted names."""
    flat: Values = {}
    for name, value in values.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat


def merge(values: Values, other: Mapping[str, Any]) -> Values:
    """Nested values overridden by `other`, without the fields that `without_replaced` drops."""
    return overlay(without_replaced(values, other), other)


def without_replaced(values: Values, other: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> Values:
    """A copy of nested values; if `other` changes a choice, the fields that depend on this choice are left out.

    Args:
        values: nested values. If `values` or `defaults` names an architecture, `values` counts as a complete recipe,
            in which a missing choice is None.
        other: nested values that will override them.
        defaults: nested values of choices that `values` leaves out.
    """
    kept, whole = copy.deepcopy(values), overlay(defaults or {}, values)
    is_whole = get(whole, "model.architecture") is not None
    for name, dependent in _DEPENDENT.items():
        choice, before = get(other, name), get(whole, name)
        if name == "model.architecture" and get(whole, "model.layers") is not None:
            before = None  # the listed layers name the architectures
        is_known = before is not None or (is_whole and name not in _OF_ARCHITECTURE)
        if choice is not None and choice != before and is_known:
            kept = without(kept, dependent)
    return kept


def without(values: Values, names: Iterable[str]) -> Values:
    """A copy of nested values without the fields of these names, `section.field`."""
    kept = copy.deepcopy(values)
    for dotted in names:
        section, field = dotted.split(".")
        if isinstance(held := kept.get(section), dict):
            held.pop(field, None)
    return kept


def overlay(values: Any, other: Mapping[str, Any]) -> Values:
    """Nested values overridden by `other`."""
    below = values if isinstance(values, Mapping) else {}
    inner = {name: overlay(below.get(name), v) if isinstance(v, Mapping) else v for name, v in other.items()}
    return {**below, **inner}
