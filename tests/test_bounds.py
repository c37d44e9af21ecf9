"""Every field of every settings class has bounds, and what lies beyond them is refused in one short sentence."""

import dataclasses
import importlib
import math
import pkgutil
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest

import multilin
from multilin.analysis.compare.sweep import Budget
from multilin.errors import InputError, shorten, shown
from multilin.settings import load_settings

LONGEST = 300
NO_SETTINGS = ("multilin.ops", "multilin.__main__", "multilin.analysis.evaluate.tasks")


@pytest.fixture(scope="module")
def settings_fields() -> list[tuple[Any, str, Any]]:
    """Class, name and type of every field of every settings class of the package."""
    found: dict[type, None] = {}
    for module in pkgutil.walk_packages(multilin.__path__, "multilin."):
        if not module.name.startswith(NO_SETTINGS):
            values = vars(importlib.import_module(module.name)).values()
            found |= {
                value: None for value in values if isinstance(value, type) and "__pydantic_config__" in vars(value)
            }
    return [(cls, name, hint) for cls in found for name, hint in get_type_hints(cls, include_extras=True).items()]


def leaves(hint: Any, metadata: tuple[Any, ...] = ()) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """The plain types inside a field's type, containers included, each with what is annotated at it."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        yield from leaves(parts[0], metadata + parts[1:])
    elif origin in (Union, types.UnionType):
        for part in parts:
            yield from leaves(part)
    else:
        yield (origin or hint), metadata
        for part in parts if origin in (list, tuple, dict) else ():
            yield from leaves(part)


def bound(metadata: tuple[Any, ...], *names: str) -> Any:
    found = [getattr(part, name) for part in metadata for name in names if hasattr(part, name)]
    return found[0] if found else None


def test_every_field_has_bounds(settings_fields: list[tuple[Any, str, Any]]) -> None:
    names = {cls.__name__ for cls, _, _ in settings_fields}
    assert {"Recipe", "TrainingRecipe", "GenerationSettings", "AdditivePreset", "Sweep", "RecallOptions"} <= names
    for cls, name, hint in settings_fields:
        field = f"{cls.__name__}.{name}"
        assert cls.__pydantic_config__["str_max_length"] <= 10_000, field
        for kind, metadata in leaves(hint):
            if kind in (int, float):
                least, most = bound(metadata, "ge", "gt"), bound(metadata, "le", "lt")
                assert least is not None, f"{field} has no smallest value"
                assert most is not None, f"{field} has no largest value"
                assert math.isfinite(least), field
                assert math.isfinite(most), field
            elif kind in (list, dict) or (kind is tuple and ... in get_args(hint)):
                assert bound(metadata, "max_length") is not None, f"{field} has no largest length of a {kind.__name__}"


def beyond(hint: Any) -> list[Any]:
    """Values that no field of this type takes."""
    inner = [leaf for leaf in leaves(hint) if leaf[0] is not types.NoneType]
    kind, metadata = inner[0]
    deep: Any = 1
    for _ in range(200):
        deep = {"a": deep}
    if len(inner) == 1 and kind in (int, float):
        least, most = bound(metadata, "ge", "gt"), bound(metadata, "le", "lt")
        others = [math.nan, math.inf, "nan", "1e999", 10**400, 10**5000, -(10**400), "9" * 10_000, True, b"1", [1], "x"]
        return [least - 1, most + 1 if kind is int else 1.01 * most, most * 1000, *others]
    if len(inner) == 1 and kind is str:
        return ["x" * 2_000_000, 3, math.nan, ["x"], b"\xff", "\ud800"]
    if kind in (list, tuple):
        return [["x"] * 100_000, [deep] * 3, {"a": 1}, "x", 3]
    if kind is dict:
        numbers = {str(number): number for number in range(20_000)}
        return [numbers, {"a": numbers}, deep, {1: 2}, {"a": math.nan}, {"a": object()}, ["a"], "x" * 10**6]
    return [object(), "x" * 10**6, {"x" * 10**6: 1}]


def required(cls: type) -> dict[str, Any]:
    """A value for every field that needs one."""
    hints = get_type_hints(cls, include_extras=True)
    names = [f.name for f in dataclasses.fields(cls) if f.default is f.default_factory is dataclasses.MISSING]
    return {name: accepted(hints[name]) for name in names}


def accepted(hint: Any) -> Any:
    if types.NoneType in get_args(hint):
        return None
    kind, metadata = next(leaves(hint))
    if kind is Literal:
        return get_args(hint)[0]
    return bound(metadata, "ge", "le") if kind in (int, float) else {str: "x", bool: True, dict: {}, list: []}[kind]


def test_what_is_beyond_is_refused_in_one_short_sentence(settings_fields: list[tuple[Any, str, Any]]) -> None:
    for cls, name, hint in settings_fields:
        load_settings(cls, required(cls))
        for value in beyond(hint):
            message = refusal(cls, {**required(cls), name: value})
            assert name in message, f"{cls.__name__}.{name}: {shown(value)}: {message or 'accepted'}"
            assert len(message) <= (2 * LONGEST if "known are" in message else LONGEST), message
            assert "\n" not in message


def refusal(cls: type, values: dict[str, Any]) -> str:
    """The sentence that refuses these values, or nothing."""
    try:
        load_settings(cls, values)
    except InputError as error:
        return str(error)
    return ""


def test_unknown_names_are_cut() -> None:
    message = refusal(Budget, {"x" * 10**6: 1})
    assert "unknown field" in message
    assert len(message) <= LONGEST


def test_a_value_is_shown_in_a_hundred_characters() -> None:
    for value in ("x" * 10**7, 10**5000, [[list(range(100))] * 99] * 9, {"a": {"b": {"c": "d" * 999}}}):
        assert len(shown(value)) <= 100
    assert shown(7) == "7"
    assert shown("a'b") == repr("a'b")


def test_messages_are_cut_in_their_middle() -> None:
    message = str(InputError("field: " + "x" * 10**6 + " cannot be read"))
    assert len(message) <= 1000
    assert message.startswith("field: x")
    assert message.endswith("x cannot be read")
    assert shorten("short") == "short"
