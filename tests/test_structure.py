"""The order of the packages, which docs/design.md lists: an import goes down, never up, and never in a circle."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import multilin

SOURCE = Path(multilin.__file__).parent
ORDER = (
    "errors", "files", "settings", "ops", "layers", "architectures", "model", "data", "runs", "inference", "training",
    "analysis", "export", "testing", "serving", "cli",
)  # fmt: skip
MOST_LOOSE_MODULES = 5


def import_graph() -> dict[str, set[str]]:
    """Every module of the package, and the modules of the package that it imports, also inside functions.

    Imports for type checkers alone do not count.
    """
    parts = {path: path.relative_to(SOURCE.parent).with_suffix("").parts for path in SOURCE.rglob("*.py")}
    known = {".".join(names).removesuffix(".__init__"): path for path, names in parts.items()}
    return {name: set(imports(path, known)) - {name} for name, path in known.items()}


def imports(path: Path, known: dict[str, Path]) -> Iterator[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in known:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from (name if name in known else node.module for name in inner)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)


def test_imports_go_down() -> None:
    for name, imported in import_graph().items():
        package = name.split(".")[1:2]
        if package and package != ["__main__"]:
            for below in {other.split(".")[1] for other in imported if "." in other} - {*package}:
                assert ORDER.index(below) < ORDER.index(package[0]), f"{name} imports {below}"


def test_no_circle_of_imports() -> None:
    TopologicalSorter(import_graph()).prepare()


def test_few_modules_lie_loose() -> None:
    loose = {path.stem for path in SOURCE.glob("*.py")} - {"__init__", "__main__"}
    assert len(loose) <= MOST_LOOSE_MODULES
    assert loose | {path.parent.name for path in SOURCE.glob("*/__init__.py")} == set(ORDER)
