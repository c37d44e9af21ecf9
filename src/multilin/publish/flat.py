"""The model's code as one file that needs PyTorch and transformers only.

transformers loads the code of a hub's model from one file, as imports of subfolders fail there. So every definition
that the model needs, of the portable backends, is written one after the other: imports inside the package disappear, a
name that two modules define gets the module's name before it, and compiled kernels say that they are absent.
"""

import ast
import builtins
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import multilin
from multilin.architectures import architectures
from multilin.model.remote import AUTO_MAP

PACKAGE = "multilin"
SETTINGS, BOUNDS, STAND_INS = f"{PACKAGE}.settings", f"{PACKAGE}.settings.bounds", f"{PACKAGE}.publish.stand_ins"
ABSENT = "compiled_kernels"
_ROOT = Path(multilin.__file__).parent
_ONLY_FOR_CHECKS = {"annotated_types", "jaxtyping", "pydantic", "pydantic_core"}  # in annotations
_Place = tuple[str, str]  # the module that defines a name, and the name; "" for the module itself
_HEAD = f'''"""multilin {multilin.__version__}: the model of this folder, in PyTorch alone.

Generated from the package multilin by `multilin publish`; comments and the compiled kernels are in the package.
"""

from __future__ import annotations
'''


@dataclass
class _Module:
    """A module of the package.

    tree: its statements.
    globals: its top-level names, its own and those it imports from the package, with the places they come from.
    """

    name: str
    tree: ast.Module
    globals: dict[str, _Place] = field(default_factory=dict)


def flat_model() -> str:
    """The text of the file."""
    found = [f"{PACKAGE}.architectures.{name}" for name in architectures()]
    modules = _closure([f"{PACKAGE}.settings", f"{PACKAGE}.model.language_model", *found])
    names = _Names(modules)
    imports, statements = {("types", ("types", ""))}, list[ast.stmt]()
    for module in modules.values():
        for statement in module.tree.body:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                if not _is_internal(statement):
                    imports |= {(name, _origin(statement, name)) for name in _bound(statement)}
            elif not _is_left_out(statement):
                statements.append(_Renamer(module, names).visit(statement))
    statements += ast.parse("\n".join(f"register({names.flat((name, 'architecture'))})" for name in found)).body
    statements = _needed(statements, {path.rpartition(".")[2] for path in AUTO_MAP.values()})
    used = {name for statement in statements for name in _mentioned(statement)} | {"Any"}
    lines = _import_lines({entry for entry in imports if entry[0] in used})
    return "\n\n\n".join(["\n".join([_HEAD, *lines]), *map(ast.unparse, statements)]) + "\n"


def _closure(roots: Iterable[str]) -> dict[str, _Module]:
    """The modules and all that they import, those that others import first."""
    modules: dict[str, _Module] = {}

    def add(name: str) -> None:
        if name in modules or _is_compiled(name) or name == BOUNDS:
            return
        tree = ast.parse(_source(name))
        module = _Module(name, tree)
        modules[name] = module
        for imported in _internal_imports(tree):
            for alias in imported.names:
                module.globals[alias.asname or alias.name] = place = _place(imported, alias.name)
                add(place[0])
        module.globals |= {bound: (name, bound) for statement in tree.body for bound in _bound(statement, own=True)}
        modules[name] = modules.pop(name)  # after what it imports

    for root in roots:
        add(root)
    return modules


def _source(name: str) -> str:
    path = _path(STAND_INS if name == SETTINGS else name)
    assert path is not None, name
    return path.read_text(encoding="utf-8")


def _path(name: str) -> Path | None:
    """The file of a module of the package; None where there is no such module."""
    base = _ROOT.joinpath(*name.split(".")[1:])
    candidates = base / "__init__.py", base.with_suffix(".py")
    return next((path for path in candidates if path.is_file()), None)


def _is_compiled(name: str) -> bool:
    """Whether a module holds kernels, or is there for them."""
    parts = name.split(".")
    is_kernel = parts[-1] == "operator" or parts[-1].partition("_")[0] in ("cpu", "gpu")
    return parts[1:2] == ["ops"] and (is_kernel or parts[2:3] == ["kernels"])


def _is_internal(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.ImportFrom):
        return (statement.module or "").split(".")[0] in {PACKAGE, "__future__", *_ONLY_FOR_CHECKS}
    return isinstance(statement, ast.Import) and statement.names[0].name.split(".")[0] == PACKAGE


def _internal_imports(tree: ast.AST) -> Iterator[ast.ImportFrom]:
    """Imports from the package, also those inside functions, but not those for type checkers alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE:
            yield node
        elif not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield from _internal_imports(node)


def _place(imported: ast.ImportFrom, name: str) -> _Place:
    """Where an imported name comes from."""
    assert imported.module is not None
    inside = f"{imported.module}.{name}"
    return (inside, "") if _path(inside) is not None else (imported.module, name)


def _is_left_out(statement: ast.stmt) -> bool:
    """Docstrings of modules, what is for type checkers or for the package, and the entry in transformers' registry."""
    is_docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    is_entry = isinstance(statement, ast.Expr) and ast.unparse(statement).startswith("Auto")
    return is_docstring or is_entry or isinstance(statement, ast.If) or list(_bound(statement)) == ["__all__"]


def _bound(statement: ast.stmt, *, own: bool = False) -> Iterator[str]:
    """Names that a top-level statement binds; `own` leaves out imports."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        yield statement.name
    elif isinstance(statement, ast.Import | ast.ImportFrom):
        if not own:
            yield from ((alias.asname or alias.name).split(".")[0] for alias in statement.names)
    else:
        yield from (n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))


class _Names:
    """Names in the flat file, by where they are defined; of two that are equal, each has its module's before it."""

    def __init__(self, modules: dict[str, _Module]) -> None:
        self._modules = modules
        places: dict[str, set[object]] = {name: {"builtin"} for name in dir(builtins)}
        for module in modules.values():
            for statement in module.tree.body:
                if isinstance(statement, ast.Import | ast.ImportFrom) and not _is_internal(statement):
                    for name in _bound(statement):
                        places.setdefault(name, set()).add(_origin(statement, name))
            for name, place in module.globals.items():
                if place[0] == module.name:
                    places.setdefault(name, set()).add(place)
                elif place[1] and place[1] != name:  # under another name, which a local one may have
                    places.setdefault(place[1], set()).add(name)
        self._shared = {name for name, found in places.items() if len(found) > 1}

    def flat(self, place: _Place) -> str:
        """The name of what is defined there."""
        module, name = place
        if module == BOUNDS:
            return "Any"
        if module not in self._modules:
            return ABSENT
        origin = self._modules[module].globals.get(name, place)
        if origin != place:
            return self.flat(origin)
        return f"{module.removeprefix(PACKAGE + '.').replace('.', '_')}_{name}" if name in self._shared else name

    def namespace(self, module: str) -> ast.expr:
        """An object with the functions of a module, where it is passed on as a value."""
        if module not in self._modules:
            return ast.Name(ABSENT, ast.Load())
        functions = [part.name for part in self._modules[module].tree.body if isinstance(part, ast.FunctionDef)]
        keywords = [ast.keyword(name, ast.Name(self.flat((module, name)), ast.Load())) for name in functions]
        return ast.Call(ast.parse("types.SimpleNamespace", mode="eval").body, [], keywords)


class _Renamer(ast.NodeTransformer):
    """Gives every top-level name of a module its name in the flat file."""

    def __init__(self, module: _Module, names: _Names) -> None:
        self.module, self.names = module, names
        self.scopes: list[tuple[bool, set[str]]] = []  # whether of a class, and the names bound in it

    def place(self, name: str) -> _Place | None:
        """Where a name comes from; None for what is local, foreign or built in."""
        for depth, (is_class, bound) in enumerate(reversed(self.scopes)):
            if name in bound and not (is_class and depth > 0):
                return None
        return self.module.globals.get(name)

    def visit_Name(self, node: ast.Name) -> ast.expr:
        is_local = self.scopes and not isinstance(node.ctx, ast.Load)
        place = None if is_local else self.place(node.id)
        if place is None:
            return node
        return ast.Name(self.names.flat(place), node.ctx) if place[1] else self.names.namespace(place[0])

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        place = self.place(node.value.id) if isinstance(node.value, ast.Name) else None
        if place is not None and place[1] == "":
            return ast.Name(self.names.flat((place[0], node.attr)), node.ctx)
        self.generic_visit(node)
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.stmt:
        return ast.Pass() if _is_internal(node) else node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.stmt:
        place = self.place(node.name)
        if not self.scopes and place is not None:
            node.name = self.names.flat(place)
        node.decorator_list = [self.visit(part) for part in node.decorator_list]
        node.args = self.visit(node.args)  # annotations and defaults belong outside
        node.returns = None if node.returns is None else self.visit(node.returns)
        with_arguments = {part.arg for part in _arguments(node.args)}
        self.scopes.append((False, with_arguments | _locals(node.body)))
        node.body = [self.visit(part) for part in node.body]
        self.scopes.pop()
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.stmt:
        place = self.place(node.name)
        if not self.scopes and place is not None:
            node.name = self.names.flat(place)
        for part in ("decorator_list", "bases", "keywords"):
            setattr(node, part, [self.visit(child) for child in getattr(node, part)])
        bound, body = set[str](), list[ast.stmt]()
        self.scopes.append((True, bound))
        for statement in node.body:  # a name is the module's until the class has one like it
            body.append(self.visit(statement))
            bound |= _locals(body[-1:])
        node.body = body
        self.scopes.pop()
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.expr:
        node.args = self.visit(node.args)
        self.scopes.append((False, {part.arg for part in _arguments(node.args)}))
        node.body = self.visit(node.body)
        self.scopes.pop()
        return node

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp) -> ast.AST:
        targets = {n.id for part in node.generators for n in ast.walk(part.target) if isinstance(n, ast.Name)}
        self.scopes.append((False, targets))
        self.generic_visit(node)
        self.scopes.pop()
        return node

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _comprehension


def _arguments(arguments: ast.arguments) -> list[ast.arg]:
    more = [part for part in (arguments.vararg, arguments.kwarg) if part is not None]
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *more]


def _locals(body: list[ast.stmt]) -> set[str]:
    """Names bound by the statements of a function or a class, not those of functions in it."""
    bound: set[str] = set()
    pending: list[ast.AST] = list(body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound.add(node.name)
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom) and not _is_internal(node):
            bound |= set(_bound(node))
        if not isinstance(node, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            pending += ast.iter_child_nodes(node)
    return bound


def _mentioned(statement: ast.stmt) -> set[str]:
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}


def _needed(statements: list[ast.stmt], roots: set[str]) -> list[ast.stmt]:
    """Those that the roots need, and calls that are made when the file is loaded."""
    by_name = {name: statement for statement in statements for name in _bound(statement)}
    needed, pending = set[int](), [s for s in statements if isinstance(s, ast.Expr)] + [by_name[n] for n in roots]
    while pending:
        statement = pending.pop()
        if id(statement) not in needed:
            needed.add(id(statement))
            pending += [by_name[name] for name in _mentioned(statement) if name in by_name]
    return [statement for statement in statements if id(statement) in needed]


def _origin(statement: ast.Import | ast.ImportFrom, name: str) -> _Place:
    """What a foreign import binds to a name."""
    alias = next(a for a in statement.names if (a.asname or a.name).split(".")[0] == name)
    if isinstance(statement, ast.ImportFrom):
        return statement.module or "", alias.name
    return alias.name, ""


def _import_lines(origins: set[tuple[str, _Place]]) -> list[str]:
    """Import statements for names and what they stand for."""
    lines, of_module = list[str](), dict[str, list[str]]()
    for name, (module, inside) in sorted(origins):
        renamed = "" if name == (inside or module.split(".")[0]) else f" as {name}"
        if inside:
            of_module.setdefault(module, []).append(f"{inside}{renamed}")
        else:
            lines.append(f"import {module}{renamed}")
    return [*lines, *(f"from {module} import {', '.join(parts)}" for module, parts in sorted(of_module.items()))]
