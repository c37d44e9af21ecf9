"""The modules of the package that a model needs, and the names that their statements bind."""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import multilin

PACKAGE = "multilin"
SETTINGS, BOUNDS, STAND_INS = f"{PACKAGE}.settings", f"{PACKAGE}.settings.bounds", f"{PACKAGE}.publish.stand_ins"
_ROOT = Path(multilin.__file__).parent
_ONLY_FOR_CHECKS = {"annotated_types", "jaxtyping", "pydantic", "pydantic_core"}  # in annotations
Place = tuple[str, str]  # the module that defines a name, and the name; "" for the module itself


@dataclass
class Module:
    """A module of the package.

    tree: its statements.
    globals: its top-level names, its own and those it imports from the package, with the places they come from.
    """

    name: str
    tree: ast.Module
    globals: dict[str, Place] = field(default_factory=dict)


def closure(roots: Iterable[str]) -> dict[str, Module]:
    """The modules and all that they import, imported modules first."""
    modules: dict[str, Module] = {}

    def add(name: str) -> None:
        if name in modules or _is_compiled(name) or name == BOUNDS:
            return
        path = _path(STAND_INS if name == SETTINGS else name)
        assert path is not None, name
        tree = ast.parse(path.read_text(encoding="utf-8"))
        module = modules[name] = Module(name, tree)
        for imported in _internal_imports(tree):
            for alias in imported.names:
                module.globals[alias.asname or alias.name] = place = _place(imported, alias.name)
                add(place[0])
        own = [part for part in tree.body if not isinstance(part, ast.Import | ast.ImportFrom)]
        module.globals |= {bound: (name, bound) for bound in bound_names(*own)}
        modules[name] = modules.pop(name)  # after what it imports

    for root in roots:
        add(root)
    return modules


def _path(name: str) -> Path | None:
    """The file of a module of the package; None if there is no such module."""
    base = _ROOT.joinpath(*name.split(".")[1:])
    candidates = base / "__init__.py", base.with_suffix(".py")
    return next((path for path in candidates if path.is_file()), None)


def _is_compiled(name: str) -> bool:
    """True for modules with kernels, and the modules that kernels are made of."""
    parts = name.split(".")
    is_kernel = parts[-1] == "operator" or parts[-1].partition("_")[0] in ("cpu", "gpu")
    return parts[1:2] == ["ops"] and (is_kernel or parts[2:3] == ["kernels"])


def is_internal(statement: ast.stmt) -> bool:
    """True for imports from the package, and for imports that only annotations need."""
    if isinstance(statement, ast.ImportFrom):
        return (statement.module or "").split(".")[0] in {PACKAGE, "__future__", *_ONLY_FOR_CHECKS}
    return isinstance(statement, ast.Import) and statement.names[0].name.split(".")[0] == PACKAGE


def _internal_imports(tree: ast.AST) -> Iterator[ast.ImportFrom]:
    """Imports from the package, also inside functions, but not under `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE:
            yield node
        elif not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield from _internal_imports(node)


def _place(imported: ast.ImportFrom, name: str) -> Place:
    """Where an imported name comes from."""
    assert imported.module is not None
    inside = f"{imported.module}.{name}"
    return (inside, "") if _path(inside) is not None else (imported.module, name)


def bound_names(*statements: ast.stmt) -> set[str]:
    """Names that statements bind, without those of nested functions, comprehensions and imports from the package."""
    bound: set[str] = set()
    pending: list[ast.AST] = list(statements)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound.add(node.name)
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom) and not is_internal(node):
            bound |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        if not isinstance(node, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            pending += ast.iter_child_nodes(node)
    return bound


def origin(statement: ast.Import | ast.ImportFrom, name: str) -> Place:
    """The module and name that an import from another package binds to a name."""
    alias = next(a for a in statement.names if (a.asname or a.name).split(".")[0] == name)
    if isinstance(statement, ast.ImportFrom):
        return statement.module or "", alias.name
    return alias.name, ""
