"""Python files with layers: how they are named, and the hashes of files that the user trusts.

Only files with a trusted hash are run.
"""

import contextlib
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from multilin.errors import InputError
from multilin.files import write_whole

_trusted: set[str] = set()  # in this process
_trusts_all = False


def is_own(name: Any) -> bool:
    """Whether the name of an architecture names a file or a module, and not an entry of the registry."""
    return isinstance(name, str) and (":" in name or name.endswith(".py"))


def own_names(model: Any) -> list[str]:
    """The names of files and modules with layers in the section `model` of a recipe."""
    if not isinstance(model, Mapping):
        return []
    layers = model.get("layers")
    entries = [model, *(layers if isinstance(layers, list | tuple) else [])]
    names = [entry.get("architecture") for entry in entries if isinstance(entry, Mapping)]
    return [str(name) for name in names if is_own(name)]


def code_hash(code: bytes) -> str:
    """SHA-256 of the content of a file, in hexadecimal."""
    return hashlib.sha256(code).hexdigest()


def trust_code(path: str | Path) -> None:
    """Trust a Python file: multilin may run files of this content from now on, also from other folders.

    The hash is remembered in `$XDG_CONFIG_HOME/multilin/trusted` (`~/.config/multilin/trusted` by default).

    Args:
        path: the file. Read it first.

    Raises:
        InputError: the file cannot be read.
    """
    try:
        remember(code_hash(Path(path).read_bytes()), Path(path))
    except OSError as error:
        raise InputError(f"path: {path} cannot be read ({error.strerror})") from None


def trust_hash(file_hash: str) -> None:
    """Trust files with this hash in this process."""
    _trusted.add(file_hash)


def trust_all() -> None:
    """Trust every file that this process is about to run, and remember its hash."""
    global _trusts_all
    _trusts_all = True


def is_trusted(file_hash: str, path: Path) -> bool:
    """Whether a file with this hash may be run; `path` is remembered with the hash if all files are trusted."""
    if _trusts_all and file_hash not in _trusted:
        remember(file_hash, path)
    return file_hash in _trusted or (_folder() / file_hash).is_file()


def remember(file_hash: str, path: Path) -> None:
    """Trust a hash, and note the path of the file that had it."""
    trust_hash(file_hash)
    # Where the folder cannot be written, the file is trusted in this process only.
    with contextlib.suppress(OSError, RuntimeError):
        _folder().mkdir(parents=True, exist_ok=True)
        if not (_folder() / file_hash).is_file():
            write_whole(_folder() / file_hash, str(path.resolve()))


def original_path(file_hash: str) -> Path | None:
    """The path of the file that first had this hash; None if it was not remembered."""
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        return Path((_folder() / file_hash).read_text(encoding="utf-8"))
    return None


def _folder() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config", "multilin", "trusted")
