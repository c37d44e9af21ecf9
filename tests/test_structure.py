"""The order of the packages, which docs/design.md draws: an import goes down, never up, and never in a circle."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import multilin

SOURCE = Path(multilin.__file__).parent
ORDER = (
    "errors", "files", "settings", "ops", "layers", "architectures", "model", "data", "scoring", "inference",
    "training", "machine", "analysis", "cli",
)  # fmt: skip
MOST_LOOSE_MODULES = 5


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    names = {path: path.relative_to(SOURCE.parent).with_suffix("").parts for path in SOURCE.rglob("*.py")}
    return {".".join(parts).removesuffix(".__init__"): path for path, parts in names.items()}


def imports(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """The modules of the package that a module imports, also inside of functions, but not for type checkers alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in known:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {entry if entry in known else node.module for entry in inner}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names if alias.name in known}
    return names - {name}


def test_imports_go_down() -> None:
    known = modules()
    for name, path in known.items():
        package = name.split(".")[1:2]
        if not package or package == ["__main__"]:
            continue
        for imported in imports(name, path, known) - {"multilin"}:
            below = imported.split(".")[1]
            assert ORDER.index(below) <= ORDER.index(package[0]), f"{name} imports {imported}"


def test_no_circle_of_imports() -> None:
    known = modules()
    TopologicalSorter({name: imports(name, path, known) for name, path in known.items()}).prepare()


def test_few_modules_lie_loose() -> None:
    loose = {path.stem for path in SOURCE.glob("*.py")} - {"__init__", "__main__"}
    assert len(loose) <= MOST_LOOSE_MODULES
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert loose | packages == set(ORDER)
