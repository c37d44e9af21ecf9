"""The model's code as files that need PyTorch and transformers only.

transformers loads the code of a hub's model from files in one folder. So `multilin.ops.rotary.reference` becomes
`ops_rotary_reference.py`, which differs from the package's file in its imports alone: they are relative. Compiled
kernels, checks of settings, and packages that only annotations need are not among the files; names imported from them
come from `publish_stand_ins.py`.
"""

import ast
from collections.abc import Iterable
from pathlib import Path

import multilin
from multilin.architectures import architectures
from multilin.model.remote import AUTO_FILE, AUTO_MAP

_PACKAGE = "multilin"
_ROOT = Path(multilin.__file__).parent
_STAND_INS = f"{_PACKAGE}.export.publish_stand_ins"
_SETTINGS = {f"{_PACKAGE}.settings", f"{_PACKAGE}.settings.bounds"}
_ONLY_FOR_CHECKS = {"annotated_types", "jaxtyping", "pydantic", "pydantic_core"}
_HEAD = f'''"""multilin {multilin.__version__}: the model of this folder, in PyTorch alone.

Written by `multilin publish`. The files beside it are those of the package multilin, without its compiled kernels.
"""
'''


def model_files(names: Iterable[str]) -> dict[str, str]:
    """The text of every file by its name, for a model with layers of these architectures of the package.

    The first is the one that `AUTO_MAP` names. It imports all others, as transformers copies what that file imports.
    """
    files: dict[str, str] = {}
    own = [f"{_PACKAGE}.architectures.{name}" for name in sorted(names)]
    for module in (_STAND_INS, f"{_PACKAGE}.model.language_model", *own):
        _add(module, files)
    lines = [f"from .{name.removesuffix('.py')} import __name__ as _" for name in sorted(files)]
    lines += [f"from .{_flat(module)} import architecture as _{_flat(module)}" for module in own]
    lines += ["from .architectures_base import register", "from .model_language_model import *", ""]
    lines += [f"register(_{_flat(module)})" for module in own]
    # transformers saves the file of a class, and all that it imports, with a model.
    lines += [f"{path.rpartition('.')[2]}.__module__ = __name__" for path in AUTO_MAP.values()]
    return {AUTO_FILE: "\n".join([_HEAD, *lines, ""]), **files}


def own_architectures() -> list[str]:
    """The architectures of this package, in whose file they have their name; others come from other packages."""
    package = f"{_PACKAGE}.architectures."
    return [name for name, one in architectures().items() if one.layer.__module__ == package + name]


def _add(module: str, files: dict[str, str]) -> None:
    """Add a module and all that it imports, unless it is there."""
    name = f"{_flat(module)}.py"
    if name in files:
        return
    path = _path(module)
    assert path is not None, module
    files[name] = ""  # so that a circle of imports ends
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    nodes = sorted(
        (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)), key=lambda n: n.lineno
    )
    for node in reversed(nodes):
        if relative := _relative(node, files):
            lines[node.lineno - 1 : node.end_lineno] = [" " * node.col_offset + line for line in relative]
    files[name] = "\n".join(lines) + "\n"


def _relative(node: ast.ImportFrom, files: dict[str, str]) -> list[str]:
    """The lines that replace an import, whose modules are added; none where it stays."""
    package = (node.module or "").partition(".")[0]
    if package not in (_PACKAGE, *_ONLY_FOR_CHECKS):
        return []
    lines = []
    for alias in node.names:
        inside = f"{node.module}.{alias.name}"
        is_module = package == _PACKAGE and _path(inside) is not None
        module, renamed = inside if is_module else str(node.module), f" as {alias.asname}" if alias.asname else ""
        if package != _PACKAGE or module in _SETTINGS or _is_compiled(module):
            lines.append(f"from .{_flat(_STAND_INS)} import {alias.name}{renamed}")
            continue
        _add(module, files)
        if is_module:
            lines.append(f"from . import {_flat(module)} as {alias.asname or alias.name}")
        else:
            lines.append(f"from .{_flat(module)} import {alias.name}{renamed}")
    return lines


def _path(module: str) -> Path | None:
    """The file of a module of the package; None if there is no such module."""
    base = _ROOT.joinpath(*module.split(".")[1:])
    candidates = base / "__init__.py", base.with_suffix(".py")
    return next((path for path in candidates if path.is_file()), None)


def _is_compiled(module: str) -> bool:
    """True for modules with kernels, and the modules that kernels are made of."""
    parts = module.split(".")
    is_kernel = parts[-1] == "operator" or parts[-1].partition("_")[0] in ("cpu", "gpu")
    return parts[1:2] == ["ops"] and (is_kernel or parts[2:3] == ["kernels"])


def _flat(module: str) -> str:
    """The name of a module's file, without its ending."""
    return module.removeprefix(f"{_PACKAGE}.").replace(".", "_")
