"""One file per published system. Every file of this folder is imported, so a new one needs no other change."""

import importlib
import pkgutil

from multilin.architectures.base import architectures, get_architecture

__all__ = ["architectures", "get_architecture"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
