"""Layers in a user's own file: FILE.py:Class, FILE.py with one class, or package.module:Class.

Such a layer has a permanent name, FILE.py:Class@HASH, in which HASH is the beginning of the file's SHA-256. The file is
copied into the folder of every model that uses it, so the folder works after the original has moved or changed. A
file is run only if the user has named its path or trusts its hash, see `multilin.files.trust`.
"""

import importlib.machinery
import linecache
import re
import sys
import traceback
import types
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from multilin.architectures.base import Architecture
from multilin.architectures.plain_module import adopt_own
from multilin.errors import InputError, listed, shown
from multilin.files import write_whole
from multilin.files.trust import code_hash, is_own, is_trusted, original_path, own_names, remember

HASH_DIGITS = 12
_NAME = re.compile(rf"(?P<file>[^/\\:@]+):(?P<cls>\w+)@(?P<hash>[0-9a-f]{{{HASH_DIGITS}}})")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+|[A-Za-z_]\w*")
_sources: dict[str, "Source"] = {}  # by permanent name


@dataclass(frozen=True)
class Source:
    """A user's file.

    file: the name of the file, `ema.py`; for package.module, `package.module`.
    code: its content.
    path: where it was read.
    """

    file: str
    code: bytes
    path: Path

    @property
    def hash(self) -> str:
        """SHA-256 of the content."""
        return code_hash(self.code)

    @property
    def file_name(self) -> str:
        """The name of the copy in a model's folder."""
        return self.file if self.file.endswith(".py") else f"{self.file.rpartition('.')[2]}.py"

    @property
    def package(self) -> str:
        """The package that relative imports start from; empty for a file."""
        return "" if self.file.endswith(".py") else self.file.rpartition(".")[0]


def write_files(model: Any, folder: Path) -> None:
    """Write the files of all own layers in the section `model` of a recipe into a folder."""
    for name, source in sources_of(own_names(model)).items():
        write_whole(folder / name, source.code)


def resolve(name: str, *, is_typed: bool) -> str:
    """The permanent name of an architecture; its file is read and run, if that was not done before.

    Args:
        name: FILE.py:Class, FILE.py, package.module:Class, or a permanent name; names of the registry stay.
        is_typed: the user typed the name, so the file is trusted. Otherwise its hash must be trusted already.

    Raises:
        InputError: there is no such file or class, the file fails when it is run, or it is not trusted.
    """
    if not is_own(name) or name in _sources:
        return name
    if _NAME.fullmatch(name):
        raise InputError(
            f"model.architecture: the code of {name} is not loaded; give the folder of a model that has it, or a file"
        )
    where, _, cls = name.rpartition(":") if ":" in name else (name, "", "")
    source = _find(where)
    if is_typed:
        remember(source.hash, source.path)
    return _load(source, cls)


def resolve_fields(model: Mapping[str, Any], *, is_typed: bool) -> dict[str, Any]:
    """The section `model` of a recipe with permanent names of architectures, see `resolve`."""
    named = dict(model)
    if is_own(named.get("architecture")):
        named["architecture"] = resolve(named["architecture"], is_typed=is_typed)
    if isinstance(named.get("layers"), list | tuple):
        named["layers"] = [_resolve_entry(entry, is_typed) for entry in named["layers"]]
    return named


def _resolve_entry(entry: Any, is_typed: bool) -> Any:
    if not isinstance(entry, Mapping) or not is_own(entry.get("architecture")):
        return entry
    return {**entry, "architecture": resolve(entry["architecture"], is_typed=is_typed)}


def open_files(names: Iterable[Any], folder: Path) -> None:
    """Load the layers with these permanent names from the files in a model's folder.

    Warns if the original of a file has changed since.

    Raises:
        InputError: the folder lacks a file, or the file is not trusted or fails when it is run.
    """
    for name in dict.fromkeys(names):
        parts = _NAME.fullmatch(name) if isinstance(name, str) else None
        if parts is None or name in _sources:
            continue
        files = sorted([*folder.glob("*.py"), *folder.glob("*/*.py")])
        source = next((s for s in (Source(parts["file"], _read(path), path) for path in files) if _has(s, parts)), None)
        if source is None:
            raise InputError(
                f"run: {folder} lacks the code of its layer {parts['file']}:{parts['cls']}: no Python file there has "
                f"a SHA-256 that begins with {parts['hash']}"
            )
        _load(source, parts["cls"])
        original = original_path(source.hash)
        if original is not None and original.is_file() and code_hash(_read(original)) != source.hash:
            warnings.warn(
                f"{original} has changed since this model was made; the model uses its own copy, {source.path}",
                stacklevel=2,
            )


def open_code(config: Mapping[str, Any], name: str | Path | None) -> None:
    """Load the layers from users' files of a config that was read from a folder or a repository on the hub."""
    names = own_names(config)
    if not names or name is None:
        return
    folder = Path(name)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(str(name), revision=config.get("_commit_hash"), allow_patterns="*.py"))
    open_files(names, folder)


def _has(source: Source, parts: re.Match[str]) -> bool:
    return source.hash.startswith(parts["hash"])


def sources_of(names: Iterable[str]) -> dict[str, Source]:
    """The files of these architectures, by the name of the copy in a model's folder."""
    files: dict[str, Source] = {}
    for source in (_sources[name] for name in dict.fromkeys(names) if name in _sources):
        file_name = source.file_name
        if source.hash != files.get(file_name, source).hash:
            file_name = f"{Path(file_name).stem}_{source.hash[:HASH_DIGITS]}.py"
        files[file_name] = source
    return files


def class_name(name: str) -> str:
    """The class in a permanent name."""
    return name.rpartition("@")[0].rpartition(":")[2]


def short_name(name: str) -> str:
    """A permanent name without its hash, for readers; other names stay."""
    return name.rpartition("@")[0] if _NAME.fullmatch(name) else name


def _find(where: str) -> Source:
    path = Path(where).expanduser()
    if where.endswith(".py"):
        if not path.is_file():
            raise InputError(f"model.architecture: there is no file {shown(where)}")
        if not re.fullmatch(r"[^/\\:@]+", path.name) or path.name == "modeling_multilin.py":
            raise InputError(f"model.architecture: a file named {shown(path.name)} given; give it another name")
        return Source(path.name, _read(path), path)
    if not _MODULE.fullmatch(where):
        raise InputError(
            f"model.architecture: {shown(where)} is neither a Python file (FILE.py:Class) nor a module "
            "(package.module:Class)"
        )
    file = _module_file(where)
    if file is None:
        raise InputError(f"model.architecture: there is no module {shown(where)} on Python's path")
    return Source(where, _read(file), file)


def _module_file(module: str) -> Path | None:
    """The file of a module; nothing is imported."""
    search: list[str] | None = None
    spec = None
    for part in module.split("."):
        spec = importlib.machinery.PathFinder.find_spec(part, search)
        if spec is None:
            return None
        search = list(spec.submodule_search_locations or [])
    origin = None if spec is None else spec.origin
    return Path(origin) if origin is not None and origin.endswith(".py") else None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"model.architecture: {path} cannot be read ({error.strerror})") from None


def _load(source: Source, cls: str) -> str:
    """Run a trusted file and register its layer; return the permanent name."""
    if not is_trusted(source.hash, source.path):
        raise InputError(
            f"model.architecture: {source.path} is code that you have not run before; read it, and add --trust-code "
            f"to run it (in Python: multilin.trust_code({str(source.path)!r}))"
        )
    module = _run(source)
    found = _choose(module, source, cls)
    label = found.__name__ if isinstance(found, type) else next(k for k, v in vars(module).items() if v is found)
    name = f"{source.file}:{label}@{source.hash[:HASH_DIGITS]}"
    adopt_own(found, name)
    _sources[name] = source
    return name


def _run(source: Source) -> types.ModuleType:
    """The module of a file; it is run once for each content."""
    name = f"multilin_own_{source.hash[:HASH_DIGITS]}"
    if name in sys.modules:
        return sys.modules[name]
    module = types.ModuleType(name)
    module.__file__, module.__package__ = str(source.path), source.package
    try:
        text = source.code.decode("utf-8")
        # For tracebacks and inspect.getsource, also after the file has changed.
        linecache.cache[str(source.path)] = (len(text), None, text.splitlines(keepends=True), str(source.path))
        sys.modules[name] = module
        exec(compile(text, str(source.path), "exec"), vars(module))
    except Exception as error:
        sys.modules.pop(name, None)
        raise InputError(f"model.architecture: {_where(error, source)} ({type(error).__name__}: {error})") from error
    return module


def _where(error: Exception, source: Source) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(source.path)]
    line = getattr(error, "lineno", None) if isinstance(error, SyntaxError) else next(reversed(lines), None)
    hint = ""
    if isinstance(error, ImportError) and (source.path.parent / f"{(error.name or '').split('.')[0]}.py").is_file():
        hint = "; a layer is one file, so move the code into it, or install it as a package"
    return f"{source.path}{f', line {line},' if line else ''} fails when it is run{hint}"


def _choose(module: types.ModuleType, source: Source, cls: str) -> Any:
    """The Architecture or the module class of this name; without a name, the only one that the file defines."""
    values = vars(module)
    found: dict[str, Any] = {name: value for name, value in values.items() if isinstance(value, Architecture)}
    if not found:
        found = {
            name: value
            for name, value in values.items()
            if isinstance(value, type) and issubclass(value, nn.Module) and value.__module__ == module.__name__
        }
    if cls:
        value = values.get(cls)
        if isinstance(value, Architecture) or (isinstance(value, type) and issubclass(value, nn.Module)):
            return value
        known = f"; it has {listed(list(found))}" if found else ""
        kind = "no class" if value is None else "no torch.nn.Module"
        raise InputError(f"model.architecture: {source.path} has {kind} {shown(cls)}{known}")
    if len(found) != 1:
        how = f"{len(found)} layers, {listed(list(found))}; name one, as in" if found else "no torch.nn.Module; give"
        raise InputError(f"model.architecture: {source.path} has {how} {source.file}:{next(iter(found), 'Class')}")
    return next(iter(found.values()))
