"""Small files that results are written to."""

import os
from pathlib import Path

from multilin.errors import InputError


def check_writable(name: str, path: str | Path) -> None:
    """Refuse, before any work, a file that could not be written after it.

    Raises:
        InputError: its folder does not exist or cannot be written, or it is a folder; the message begins with `name`.
    """
    path = Path(path)
    if path.is_dir():
        raise InputError(f"{name}: {path} is a folder; give a file")
    if not path.parent.is_dir():
        raise InputError(f"{name}: the folder {path.parent} does not exist")
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"{name}: the folder {path.parent} cannot be written")


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write a file (text as UTF-8) beside its place and rename it, so that it is complete or not there."""
    path = Path(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(content.encode() if isinstance(content, str) else content)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
