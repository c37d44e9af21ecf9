"""Replacements in the flat file: settings without checks, and a stand-in for compiled kernels."""

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


class _CompiledKernels:
    """Compiled kernels are part of the package multilin only: `pip install multilin`."""

    def __getattr__(self, name: str) -> "_CompiledKernels":
        return self

    def __call__(self, *arguments: Any, **options: Any) -> str:
        return "compiled kernels are part of the package multilin"


compiled_kernels = _CompiledKernels()
