"""The model's code as one file that needs PyTorch and transformers only.

transformers loads the code of a hub's model from one file, as imports of subfolders fail there. So every definition
that the model needs, of the portable backends, is written one after the other: imports inside the package disappear, a
name that two modules define gets the module's name before it, and compiled kernels say that they are absent.
"""

import ast

import multilin
from multilin.architectures import architectures
from multilin.model.remote import AUTO_MAP
from multilin.publish.modules import PACKAGE, Place, bound_names, closure, is_internal, origin
from multilin.publish.renaming import Names, renamed

_HEAD = f'''"""multilin {multilin.__version__}: the model of this folder, in PyTorch alone.

Generated from the package multilin by `multilin publish`; comments and the compiled kernels are in the package.
"""

from __future__ import annotations
'''


def flat_model() -> str:
    """The text of the file."""
    found = [f"{PACKAGE}.architectures.{name}" for name in own_architectures()]
    modules = closure([f"{PACKAGE}.settings", f"{PACKAGE}.model.language_model", *found])
    names = Names(modules)
    imports, statements = {("types", ("types", ""))}, list[ast.stmt]()
    for module in modules.values():
        for statement in module.tree.body:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                if not is_internal(statement):
                    imports |= {(name, origin(statement, name)) for name in bound_names(statement)}
            elif not _is_left_out(statement):
                statements.append(renamed(statement, module, names))
    statements += ast.parse("\n".join(f"register({names.flat((name, 'architecture'))})" for name in found)).body
    statements = _needed(statements, {path.rpartition(".")[2] for path in AUTO_MAP.values()})
    used = {name for statement in statements for name in _mentioned(statement)} | {"Any"}
    lines = _import_lines({entry for entry in imports if entry[0] in used})
    return "\n\n\n".join(["\n".join([_HEAD, *lines]), *map(ast.unparse, statements)]) + "\n"


def own_architectures() -> list[str]:
    """The architectures of this package, in whose file they have their name; others come from other packages."""
    package = f"{PACKAGE}.architectures."
    return [name for name, one in architectures().items() if one.layer.__module__ == package + name]


def _is_left_out(statement: ast.stmt) -> bool:
    """True for module docstrings, `if` blocks for type checkers, `__all__`, and entries in transformers' registry."""
    is_docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    is_entry = isinstance(statement, ast.Expr) and ast.unparse(statement).startswith("Auto")
    return is_docstring or is_entry or isinstance(statement, ast.If) or bound_names(statement) == {"__all__"}


def _mentioned(statement: ast.stmt) -> set[str]:
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}


def _needed(statements: list[ast.stmt], roots: set[str]) -> list[ast.stmt]:
    """The statements that the names in `roots` need, and calls that are made when the file is loaded."""
    by_name = {name: statement for statement in statements for name in bound_names(statement)}
    needed, pending = set[int](), [s for s in statements if isinstance(s, ast.Expr)] + [by_name[n] for n in roots]
    while pending:
        statement = pending.pop()
        if id(statement) not in needed:
            needed.add(id(statement))
            pending += [by_name[name] for name in _mentioned(statement) if name in by_name]
    return [statement for statement in statements if id(statement) in needed]


def _import_lines(origins: set[tuple[str, Place]]) -> list[str]:
    """Import statements that bind names to their origins."""
    lines, of_module = list[str](), dict[str, list[str]]()
    for name, (module, inside) in sorted(origins):
        renamed = "" if name == (inside or module.split(".")[0]) else f" as {name}"
        if inside:
            of_module.setdefault(module, []).append(f"{inside}{renamed}")
        else:
            lines.append(f"import {module}{renamed}")
    return [*lines, *(f"from {module} import {', '.join(parts)}" for module, parts in sorted(of_module.items()))]
