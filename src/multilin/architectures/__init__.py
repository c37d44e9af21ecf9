"""One file per published system, which defines `architecture`. This module registers every file in the folder."""

import importlib
import pkgutil

from multilin.architectures.base import architectures, get_architecture, register

__all__ = ["architectures", "get_architecture", "register"]

for _found in pkgutil.iter_modules(__path__):
    if _found.name != "base":
        register(importlib.import_module(f"{__name__}.{_found.name}").architecture)
