"""Small language models with linear-time and multilinear layers: train, run, explain and compare them.

Importing the package registers its models with transformers' AutoConfig and AutoModelForCausalLM.
"""

import importlib
import sys
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multilin.errors import InputError
    from multilin.files.trust import trust_code
    from multilin.model import MultilinConfig, MultilinForCausalLM, MultilinModel, TextState

__version__ = "0.2.0"
__all__ = ["InputError", "MultilinConfig", "MultilinForCausalLM", "MultilinModel", "TextState", "trust_code"]
_LIGHT = {"InputError": "multilin.errors", "trust_code": "multilin.files.trust"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(_LIGHT.get(name, "multilin.model"))
    return getattr(module, name)


def _is_command_line() -> bool:
    """Whether this process is `multilin ...` or `python -m multilin ...`, whose --help must not wait for PyTorch."""
    program, arguments = (sys.argv or [""])[0], sys.argv[1:]
    if program != "-m":
        return PurePath(program).name in ("multilin", "multilin.exe")
    # Python is looking for a module to run, perhaps this one.
    options = sys.orig_argv[: len(sys.orig_argv) - len(arguments)]
    return options[-2:] == ["-m", __name__] or options[-1:] == [f"-m{__name__}"]


if not _is_command_line():
    importlib.import_module("multilin.model")
