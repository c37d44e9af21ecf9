"""One file per published system, which ends with its `architecture`. All files of this folder are found here."""

import importlib
import pkgutil

from multilin.architectures.base import architectures, get_architecture, register

__all__ = ["architectures", "get_architecture", "register"]

for _found in pkgutil.iter_modules(__path__):
    if _found.name != "base":
        register(importlib.import_module(f"{__name__}.{_found.name}").architecture)
