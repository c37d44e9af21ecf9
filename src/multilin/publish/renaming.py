"""New names for the definitions of all modules, so that they can be in one file."""

import ast
import builtins

from multilin.publish.modules import BOUNDS, PACKAGE, Module, Place, bound_names, is_internal, origin

ABSENT = "compiled_kernels"


class Names:
    """The names in the flat file; a name that two modules define gets the name of its module as a prefix."""

    def __init__(self, modules: dict[str, Module]) -> None:
        self._modules = modules
        places: dict[str, set[object]] = {name: {"builtin"} for name in dir(builtins)}
        for module in modules.values():
            for statement in module.tree.body:
                if isinstance(statement, ast.Import | ast.ImportFrom) and not is_internal(statement):
                    for name in bound_names(statement):
                        places.setdefault(name, set()).add(origin(statement, name))
            for name, place in module.globals.items():
                if place[0] == module.name:
                    places.setdefault(name, set()).add(place)
                elif place[1] and place[1] != name:  # under another name, which a local one may have
                    places.setdefault(place[1], set()).add(name)
        self._shared = {name for name, found in places.items() if len(found) > 1}

    def flat(self, place: Place) -> str:
        """The name in the flat file of the definition at a place."""
        module, name = place
        if module == BOUNDS:
            return "Any"
        if module not in self._modules:
            return ABSENT
        defined = self._modules[module].globals.get(name, place)
        if defined != place:
            return self.flat(defined)
        return f"{module.removeprefix(PACKAGE + '.').replace('.', '_')}_{name}" if name in self._shared else name

    def namespace(self, module: str) -> ast.expr:
        """An expression with the functions of a module as attributes, for a module that is used as a value."""
        if module not in self._modules:
            return ast.Name(ABSENT, ast.Load())
        functions = [part.name for part in self._modules[module].tree.body if isinstance(part, ast.FunctionDef)]
        keywords = [ast.keyword(name, ast.Name(self.flat((module, name)), ast.Load())) for name in functions]
        return ast.Call(ast.parse("types.SimpleNamespace", mode="eval").body, [], keywords)


def renamed(statement: ast.stmt, module: Module, names: Names) -> ast.stmt:
    """A top-level statement of a module with the names of the flat file, changed in place."""
    result: ast.stmt = _Renamer(module, names).visit(statement)
    return result


class _Renamer(ast.NodeTransformer):
    """Gives every top-level name of a module its name in the flat file."""

    def __init__(self, module: Module, names: Names) -> None:
        self.module, self.names = module, names
        self.scopes: list[tuple[bool, set[str]]] = []  # whether of a class, and the names bound in it

    def place(self, name: str) -> Place | None:
        """The place that a name comes from; None for local names, names of other packages, and built-in names."""
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
        return ast.Pass() if is_internal(node) else node

    def _rename(self, node: ast.FunctionDef | ast.ClassDef) -> None:
        """Rename a top-level definition."""
        place = self.place(node.name)
        if not self.scopes and place is not None:
            node.name = self.names.flat(place)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.stmt:
        self._rename(node)
        node.decorator_list = [self.visit(part) for part in node.decorator_list]
        node.args = self.visit(node.args)  # annotations and defaults belong outside
        node.returns = None if node.returns is None else self.visit(node.returns)
        self.scopes.append((False, _arguments(node.args) | bound_names(*node.body)))
        node.body = [self.visit(part) for part in node.body]
        self.scopes.pop()
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.stmt:
        self._rename(node)
        for part in ("decorator_list", "bases", "keywords"):
            setattr(node, part, [self.visit(child) for child in getattr(node, part)])
        bound, body = set[str](), list[ast.stmt]()
        self.scopes.append((True, bound))
        for statement in node.body:  # a name is the module's until the class has one like it
            body.append(self.visit(statement))
            bound |= bound_names(*body[-1:])
        node.body = body
        self.scopes.pop()
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.expr:
        node.args = self.visit(node.args)
        self.scopes.append((False, _arguments(node.args)))
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


def _arguments(arguments: ast.arguments) -> set[str]:
    return {part.arg for part in ast.walk(arguments) if isinstance(part, ast.arg)}
