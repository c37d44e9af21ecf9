"""The flags of a verb, which come from settings dataclasses.

A verb is a function whose parameters are settings dataclasses. Each field is a flag, with its comment as help; a field
without a default, or marked `POSITIONAL`, is a positional argument. `Annotated[dict, Recipe]` gives a flag
`--section.field` for every field of every section of Recipe, and the function gets only the fields that a user gave.
"""

import dataclasses
import types
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

POSITIONAL = "positional"
"""Marks a field with a default as a positional argument: `recipe: Annotated[str | None, POSITIONAL] = None`."""


class Flag(NamedTuple):
    """A field of a settings class as a flag of the command line."""

    owner: type
    field: "dataclasses.Field[Any]"
    hint: Any
    section: str
    is_positional: bool
    is_change: bool  # changes a field of a recipe; absent from the parsed values unless given

    @property
    def key(self) -> str:
        """The flag's name among the parsed values: `section.field`, or `field` without a section."""
        return f"{self.section}.{self.field.name}" if self.section else self.field.name

    @property
    def is_list(self) -> bool:
        """True for a positional argument that takes any number of texts."""
        return self.is_positional and self.hint == list[str]

    @property
    def is_text_or_list(self) -> bool:
        """True for a flag that takes a list of texts, or a single text as it is."""
        return bool(self.hint == tuple[str, ...])

    @property
    def text(self) -> str:
        """The flag as a user types it."""
        if self.is_positional:
            return self.field.name.upper()
        return f"--{self.key}" if self.section else f"--{self.key.replace('_', '-')}"

    @property
    def given_type(self) -> Any:
        """The type that the flag's text is turned into; `str` for optional texts, so that "null" stays a text."""
        is_text = set(get_args(self.hint)) == {str, types.NoneType}
        return str if is_text and not self.is_change else self.hint

    @property
    def takes(self) -> str:
        """The placeholder for the value in the help; empty for a switch."""
        is_switch = self.hint is bool and not self.is_change
        if self.is_positional or is_switch:
            return ""
        return f"TEXT|{_metavar(self.hint)}" if self.is_text_or_list else _metavar(self.hint)

    @property
    def default(self) -> Any:
        """The field's default; MISSING where a value is required."""
        if self.field.default_factory is not dataclasses.MISSING:
            return self.field.default_factory()
        return self.field.default


def flags(function: Callable[..., Any]) -> Iterator[Flag]:
    """Every flag of a verb."""
    for hint in parameters(function):
        yield from flags_of(hint)


def flags_of(hint: Any) -> Iterator[Flag]:
    """Every flag of a verb's parameter of this type."""
    if get_origin(hint) is not Annotated:
        yield from _fields(hint, "", is_change=False)
        return
    changed = get_args(hint)[1]
    sections = {name: owner for name, owner in get_type_hints(changed).items() if dataclasses.is_dataclass(owner)}
    for section, owner in sections.items():
        yield from _fields(owner, section, is_change=True)
    yield from (flag for flag in _fields(changed, "", is_change=True) if flag.key not in sections)


def _fields(owner: Any, section: str, *, is_change: bool) -> Iterator[Flag]:
    hints, marked = get_type_hints(owner), get_type_hints(owner, include_extras=True)
    for field in dataclasses.fields(owner):
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        is_positional = required or POSITIONAL in getattr(marked[field.name], "__metadata__", ())
        yield Flag(owner, field, hints[field.name], section, is_positional, is_change)


def parameters(function: Callable[..., Any]) -> list[Any]:
    """The types of a verb's parameters."""
    hints = get_type_hints(function, include_extras=True)
    return [hint for name, hint in hints.items() if name != "return"]


def _metavar(hint: Any) -> str:
    origin, parts = get_origin(hint), [part for part in get_args(hint) if part is not types.NoneType]
    if origin in (Union, types.UnionType):
        return "|".join(_metavar(part) for part in parts)
    if origin is Literal:
        return f"{{{','.join(map(str, parts))}}}"
    if origin in (tuple, list):
        members = [_metavar(part) for part in parts if part is not ...]
        return f"[{','.join(members if len(members) > 1 else [*members, '...'])}]"
    words = {int: "N", float: "X", bool: "{true,false}"}
    return words.get(hint, "JSON" if origin is dict or dataclasses.is_dataclass(hint) else "TEXT")
