"""Settings are dataclasses. A field's comment is the help of the field; plain data is checked when it is loaded.

    @settings
    class Window:
        width: int = 4  # tokens read, the current one included

`field_help(Window)` gives {"width": "tokens read, the current one included"}. `load_settings` builds and checks a
Window from a dictionary (a YAML section, a part of config.json). `dataclasses.asdict` turns it into a dictionary.
"""

import dataclasses
import functools
import inspect
import re
import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast, dataclass_transform, get_args, get_origin

from multilin.errors import InputError, nearest, shorten, shown
from multilin.settings.bounds import LONGEST_TEXT

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

SettingsT = TypeVar("SettingsT")


@dataclass_transform(frozen_default=True)
def settings(cls: type[SettingsT]) -> type[SettingsT]:
    """Make a class a frozen dataclass that refuses unknown fields, values of a wrong type, and nan and infinity.

    The type of a field contains the bounds of its numbers, see `multilin.settings.bounds`.
    """
    # Not strict, so that "5e-4", as a query or a quoted text gives it, is a number; "abc" and 1.5 layers stay errors.
    cls.__pydantic_config__ = {  # type: ignore[attr-defined]
        "extra": "forbid", "allow_inf_nan": False, "str_max_length": LONGEST_TEXT
    }  # fmt: skip
    return dataclasses.dataclass(frozen=True)(cls)


@functools.cache
def field_help(cls: type) -> dict[str, str]:
    """The comment on the line of each field, also of inherited fields."""
    comments: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if "HELP" in vars(base):  # made from a signature, so without source
            comments |= base.HELP  # type: ignore[attr-defined]
        elif dataclasses.is_dataclass(base):
            comments |= dict(re.findall(r"^\s+(\w+): .*  # (.+)$", inspect.getsource(base), re.MULTILINE))
    return {field.name: comments.get(field.name, "") for field in dataclasses.fields(cls)}


def load_settings(cls: type[SettingsT], values: Mapping[str, Any], where: str = "") -> SettingsT:
    """Build `cls` from plain data; `where` is the path of this section, for messages (`model`).

    Raises:
        InputError: a field is unknown (the message names the nearest known field) or missing, or a type is wrong.
    """
    from pydantic import ValidationError  # only here, because help on the command line does not need it

    try:
        return cast(SettingsT, _adapter(cast(Any, cls)).validate_python(without_empty(cls, values)))
    except ValidationError as error:
        raise InputError(_sentence(cls, error, where)) from None


def without_empty(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Plain data for `cls` without sections and lists that are null. A YAML section of only comments is null.

    If a field accepts null, a null value is kept.
    """
    hints = {field.name: field.type for field in dataclasses.fields(cls)}
    kept = {}
    for name, value in values.items():
        hint = hints.get(name)
        hint = get_args(hint)[0] if get_origin(hint) is Annotated else hint
        if value is None and (dataclasses.is_dataclass(hint) or get_origin(hint) in (dict, list, tuple)):
            continue
        is_section = dataclasses.is_dataclass(hint) and isinstance(value, Mapping)
        kept[name] = without_empty(cast(type, hint), value) if is_section else value
    return kept


@functools.cache
def _adapter(cls: Any) -> "TypeAdapter[Any]":
    from pydantic import TypeAdapter

    return TypeAdapter(cls)


def _sentence(cls: type, error: "ValidationError", where: str) -> str:
    """The first mistake as one sentence, which names only the fields of pydantic's location, not members of unions."""
    errors = error.errors(include_url=False)
    first = errors[0]
    path: list[str] = []
    owner: Any = cls
    for part in first["loc"]:
        known = (
            {field.name: field.type for field in dataclasses.fields(owner)} if dataclasses.is_dataclass(owner) else {}
        )
        if part in known:
            path.append(str(part))
            owner = known[part]
            if get_origin(owner) is types.UnionType:  # the type of a section that may be left out
                owner = get_args(owner)[0]
        elif _is_dictionary(owner) and isinstance(part, str):
            path.append(shorten(part))
            owner = object
        elif first["type"] == "unexpected_keyword_argument" and part == first["loc"][-1]:
            hint = nearest(str(part), known) or f"; known are {', '.join(known)}"
            return f"{_dotted(where, *path, shorten(str(part)))}: unknown field{hint}"
        elif isinstance(part, int):
            path.append(str(part))
    field = _dotted(where, *path)
    if first["type"] in ("value_error", "assertion_error"):
        return f"{field}: {first['ctx']['error']}" if field else str(first["ctx"]["error"])
    if first["type"] in ("missing", "missing_argument"):
        return f"{_dotted(where, *path[:-1], str(first['loc'][-1]))}: missing; a value is required"
    same = [e for e in errors if e["loc"][: len(path)] == first["loc"][: len(path)]]
    return (
        f"{field}: {'null' if first['input'] is None else shown(first['input'])} given, but it should be "
        f"{' or '.join(dict.fromkeys(map(_accepted, same)))}"
    )


def _is_dictionary(hint: Any) -> bool:
    return get_origin(get_args(hint)[0] if get_origin(hint) is Annotated else hint) is dict


def _dotted(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def _accepted(error: Any) -> str:
    """The accepted values, in words, from an error of pydantic."""
    bounds = {
        "greater_than": "above {gt}",
        "greater_than_equal": "at least {ge}",
        "less_than": "below {lt}",
        "less_than_equal": "at most {le}",
        "string_too_long": "a text of at most {max_length} characters",
        "too_long": "of at most {max_length} entries",
        "too_short": "of at least {min_length} entries",
        "int_parsing_size": "a valid integer",
        "dict_type": "a dictionary of names and values",
        "dataclass_type": "a dictionary of names and values",
        "mapping_type": "a dictionary of names and values",
        "list_type": "a list",
        "tuple_type": "a list",
        "none_required": "null",
        "bool_type": "true or false",
        "bool_parsing": "true or false",
    }
    words = bounds.get(error["type"])
    return str(error["msg"]).removeprefix("Input should be ") if words is None else words.format(**error.get("ctx", {}))
