"""Every file in this folder defines one published system as `architecture`. This module registers all of them."""

import importlib
import pkgutil

from multilin.architectures.base import architectures, get_architecture, register

__all__ = ["architectures", "get_architecture", "register"]

for _found in pkgutil.iter_modules(__path__):
    if _found.name not in ("base", "own_file", "plain_module"):
        register(importlib.import_module(f"{__name__}.{_found.name}").architecture)
