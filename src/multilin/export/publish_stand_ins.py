"""For published folders: settings without checks, and a stand-in for everything else that the folder lacks."""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from multilin.errors import InputError

SettingsT = TypeVar("SettingsT")


def settings(cls: type[SettingsT]) -> type[SettingsT]:
    """Make a class a frozen dataclass; its values were checked when the model was published."""
    return dataclasses.dataclass(frozen=True)(cls)


def load_settings(cls: type[SettingsT], values: Mapping[str, Any], where: str = "") -> SettingsT:
    """Build `cls` from plain data.

    Raises:
        InputError: an unknown field, or one that is missing.
    """
    try:
        return cls(**values)
    except TypeError as error:
        raise InputError(f"{where}: {error}") from None


def open_code(config: Mapping[str, Any], name: Any) -> None:
    """Do nothing: the folder's main file imports the layers from users' files."""


def resolve(name: str, **_: Any) -> str:
    """Return the name: names in the folder are permanent."""
    return name


def resolve_fields(model: Mapping[str, Any], **_: Any) -> dict[str, Any]:
    """Return the section of the model: names in the folder are permanent."""
    return dict(model)


def sources_of(names: Any) -> dict[str, Any]:
    """Return nothing: transformers copies all files that the folder's main file imports."""
    return {}


class _Absent:
    """A stand-in for types that only annotations need, and for compiled kernels; calls say why they are absent."""

    def __call__(self, *arguments: Any, **options: Any) -> str:
        return "compiled kernels are part of the package multilin"

    def _itself(self, other: Any) -> "_Absent":
        return self

    __getattr__ = __getitem__ = __or__ = __ror__ = _itself


_absent = _Absent()


def __getattr__(name: str) -> _Absent:
    """Return the stand-in for any name that this file does not define."""
    if name.startswith("__"):
        raise AttributeError(name)
    return _absent
