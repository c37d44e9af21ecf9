"""Two corpora inside every Python installation, so that a first model needs no download."""

import ast
import io
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator
from pathlib import Path

from multilin.errors import InputError

_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}
_TOPICS = "pydoc_data.topics"
_Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def library_files() -> list[Path]:
    """The standard library's sources and texts, without tests and installed packages, in a fixed order.

    Raises:
        InputError: this Python came without its library's sources.
    """
    root = _root()
    files = [
        path
        for path in root.rglob("*")
        if path.suffix in (".py", ".rst", ".txt") and not _LEFT_OUT.intersection(path.relative_to(root).parts)
    ]
    if not any(path.suffix == ".py" for path in files):
        raise InputError(f"the built-in corpora are read from Python's standard library, but {root} holds no sources")
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def python_source() -> Iterator[tuple[str, str]]:
    """Name and text of every module of the standard library, about 11 MB."""
    for name, text in _modules():
        if name != _TOPICS:
            yield name, text


def python_docs() -> Iterator[tuple[str, str]]:
    """Name and text of the documentation in the standard library, about 2.5 MB.

    One document per module (its docstrings, each below the signature it documents), per topic of `help()` and per text.
    """
    for name, text in _modules():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # the library's own old escapes
            tree = ast.parse(text)
        if name == _TOPICS:
            yield from _topics(tree)
        elif documentation := "\n\n".join(_docstrings(tree, prefix="")):
            yield name, f"{name}\n\n{documentation}\n"
    root = _root()
    for path in library_files():
        if path.suffix != ".py":
            yield path.relative_to(root).as_posix(), path.read_bytes().decode(errors="replace")


def _root() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _modules() -> Iterator[tuple[str, str]]:
    root = _root()
    for path in library_files():
        if path.suffix == ".py":
            content = path.read_bytes()
            encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
            name = ".".join(path.relative_to(root).with_suffix("").parts)
            yield name.removesuffix(".__init__"), content.decode(encoding)


def _topics(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
            for topic, text in ast.literal_eval(statement.value).items():
                yield f"topic {topic}", text


def _docstrings(node: ast.Module | _Definition, prefix: str) -> Iterator[str]:
    docstring = ast.get_docstring(node)
    if docstring and isinstance(node, ast.Module):
        yield docstring
    elif docstring:
        yield f"{_signature(node, prefix)}\n\n{docstring}"
    inner = prefix if isinstance(node, ast.Module) else f"{prefix}{node.name}."
    for definition in _definitions(node):
        yield from _docstrings(definition, inner)


def _definitions(node: ast.AST) -> Iterator[_Definition]:
    """Definitions directly below `node`, also those under an `if` or a `try`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Definition):
            yield child
        elif isinstance(child, ast.stmt | ast.excepthandler):
            yield from _definitions(child)


def _signature(node: ast.Module | _Definition, prefix: str) -> str:
    if isinstance(node, ast.ClassDef):
        return f"class {prefix}{node.name}"
    assert not isinstance(node, ast.Module)
    return f"{prefix}{node.name}({ast.unparse(node.args)})"
