"""The order of the packages, which docs/design.md draws: an import goes down, never up, and never in a circle."""

from graphlib import TopologicalSorter
from pathlib import Path

import multilin
from tests.docs.generator import package_picture

SOURCE = Path(multilin.__file__).parent
ORDER = (
    "errors", "files", "settings", "ops", "layers", "architectures", "model", "data", "scoring", "inference",
    "training", "machine", "analysis", "export", "publish", "serving", "cli",
)  # fmt: skip
MOST_LOOSE_MODULES = 5


def test_imports_go_down() -> None:
    for package, imported in package_picture.package_graph().items():
        for below in imported:
            assert ORDER.index(below) < ORDER.index(package), f"{package} imports {below}"


def test_no_circle_of_imports() -> None:
    TopologicalSorter(package_picture.import_graph()).prepare()


def test_few_modules_lie_loose() -> None:
    loose = {path.stem for path in SOURCE.glob("*.py")} - {"__init__", "__main__"}
    assert len(loose) <= MOST_LOOSE_MODULES
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert loose | packages == set(ORDER) == set(package_picture.COLUMNS)
