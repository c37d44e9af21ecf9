"""Settings are dataclasses: one comment per field serves as its help, and one checked way in from plain data.

    @settings
    class Window:
        width: int = 4  # tokens read, the current one included

`field_help(Window)` gives {"width": "tokens read, the current one included"}, `load_settings` builds and checks a
Window from a dictionary (a YAML section, a part of config.json), `dataclasses.asdict` goes back.
"""

import dataclasses
import functools
import inspect
import io
import tokenize
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast, dataclass_transform

from multilin.errors import InputError, nearest

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

SettingsT = TypeVar("SettingsT")


@dataclass_transform(frozen_default=True)
def settings(cls: type[SettingsT]) -> type[SettingsT]:
    """Make a class a frozen dataclass that refuses unknown fields and values of a wrong type."""
    # Not strict, so that "5e-4", which YAML reads as a string, is a number; "abc" and 1.5 layers still are not.
    cls.__pydantic_config__ = {"extra": "forbid"}  # type: ignore[attr-defined]
    return dataclasses.dataclass(frozen=True)(cls)


@functools.cache
def field_help(cls: type) -> dict[str, str]:
    """The comment on each field's line, own fields and inherited ones."""
    comments: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            comments |= _comments_in(inspect.getsource(base))
    return {field.name: comments.get(field.name, "") for field in dataclasses.fields(cls)}


def _comments_in(source: str) -> dict[str, str]:
    comments: dict[str, str] = {}
    line_start = None
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME and line_start is None:
            line_start = token.string
        elif token.type == tokenize.COMMENT and line_start is not None:
            comments.setdefault(line_start, token.string.lstrip("# "))
        elif token.type in (tokenize.NEWLINE, tokenize.NL):
            line_start = None
    return comments


def load_settings(cls: type[SettingsT], values: Mapping[str, Any], where: str = "") -> SettingsT:
    """Build `cls` from plain data; `where` is the path of this section, for messages (`model`).

    Raises:
        InputError: an unknown field (with the nearest known one), a value of a wrong type, or a missing field.
    """
    from pydantic import ValidationError  # only here, because help on the command line does not need it

    try:
        return cast(SettingsT, _adapter(cast(Any, cls)).validate_python(dict(values)))
    except ValidationError as error:
        raise InputError(_sentence(cls, error, where)) from None


@functools.cache
def _adapter(cls: Any) -> "TypeAdapter[Any]":
    from pydantic import TypeAdapter

    return TypeAdapter(cls)


def _sentence(cls: type, error: "ValidationError", where: str) -> str:
    """The first mistake as one sentence. A union's members appear in pydantic's location; field names alone stay."""
    first = error.errors(include_url=False)[0]
    path: list[str] = [where] if where else []
    owner: Any = cls
    for part in first["loc"]:
        known = (
            {field.name: field.type for field in dataclasses.fields(owner)} if dataclasses.is_dataclass(owner) else {}
        )
        if part in known:
            path.append(str(part))
            owner = known[part] if isinstance(known[part], type) else object
        elif first["type"] == "unexpected_keyword_argument" and part == first["loc"][-1]:
            hint = nearest(str(part), known) or f"; known are {', '.join(known)}"
            return f"{'.'.join([*path, str(part)])}: unknown field{hint}"
        elif isinstance(part, int):
            path.append(str(part))
    accepted = " or ".join(
        dict.fromkeys(
            e["msg"].removeprefix("Input should be ")
            for e in error.errors()
            if e["loc"][: len(path)] == first["loc"][: len(path)]
        )
    )
    if first["type"] in ("value_error", "assertion_error"):
        return f"{'.'.join(path)}: {first['ctx']['error']}" if path else str(first["ctx"]["error"])
    if first["type"] in ("missing", "missing_argument"):
        return f"{'.'.join([*path[:-1], str(first['loc'][-1])])}: missing; a value is required"
    return f"{'.'.join(path)}: {first['input']!r} given, but it should be {accepted}"
