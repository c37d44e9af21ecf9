"""Two corpora inside every Python installation, so that a first model needs no download."""

import ast
import io
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator
from pathlib import Path

from multilin.data.files import Document
from multilin.errors import InputError

_ROOT = Path(sysconfig.get_path("stdlib"))
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}
_TOPICS = "pydoc_data.topics"
_Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def library_files() -> list[Path]:
    """The files of the standard library (sources and texts, no tests, no installed packages), in a fixed order.

    Raises:
        InputError: this installation of Python lacks the sources of the standard library.
    """
    files = [
        path
        for path in _ROOT.rglob("*")
        if path.suffix in (".py", ".rst", ".txt") and not _LEFT_OUT.intersection(path.relative_to(_ROOT).parts)
    ]
    if not any(path.suffix == ".py" for path in files):
        raise InputError(f"the built-in corpora are read from Python's standard library, but {_ROOT} holds no sources")
    return sorted(files, key=lambda path: path.relative_to(_ROOT).as_posix())


def python_source() -> Iterator[Document]:
    """Every module of the standard library, about 11 MB."""
    return (module for module in _modules() if module.name != _TOPICS)


def python_docs() -> Iterator[Document]:
    """The documentation in the standard library, about 2.5 MB.

    There is one document per module (docstrings, each below its signature), per topic of `help()` and per text file.
    """
    for module in _modules():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # the library's own old escapes
            tree = ast.parse(module.text)
        if module.name == _TOPICS:
            yield from _topics(tree)
        elif documentation := "\n\n".join(_docstrings(tree, prefix="")):
            yield Document(module.name, f"{module.name}\n\n{documentation}\n")
    for path in library_files():
        if path.suffix != ".py":
            yield Document(path.relative_to(_ROOT).as_posix(), path.read_bytes().decode(errors="replace"))


def _modules() -> Iterator[Document]:
    for path in library_files():
        if path.suffix == ".py":
            content = path.read_bytes()
            encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
            name = ".".join(path.relative_to(_ROOT).with_suffix("").parts)
            yield Document(name.removesuffix(".__init__"), content.decode(encoding))


def _topics(tree: ast.Module) -> Iterator[Document]:
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
            for topic, text in ast.literal_eval(statement.value).items():
                yield Document(f"topic {topic}", text)


def _docstrings(node: ast.Module | _Definition, prefix: str) -> Iterator[str]:
    heading, inner = "", prefix
    if not isinstance(node, ast.Module):
        name, inner = f"{prefix}{node.name}", f"{prefix}{node.name}."
        signature = f"class {name}" if isinstance(node, ast.ClassDef) else f"{name}({ast.unparse(node.args)})"
        heading = f"{signature}\n\n"
    if docstring := ast.get_docstring(node):
        yield heading + docstring
    for definition in _definitions(node):
        yield from _docstrings(definition, inner)


def _definitions(node: ast.AST) -> Iterator[_Definition]:
    """Definitions directly below `node`, also those under an `if` or a `try`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Definition):
            yield child
        elif isinstance(child, ast.stmt | ast.excepthandler):
            yield from _definitions(child)
