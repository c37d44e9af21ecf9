"""Named files of a store: in a folder, at any other address that fsspec knows, or in memory.

Names begin with a kind and random characters, as in turn_4fK...; the files of a kind are spread over folders by the
first two characters, so that a folder stays small and a file is found by the beginning of its name.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import fsspec
from fsspec.implementations.local import LocalFileSystem

from multilin.errors import InputError
from multilin.files import write_whole


class Folder(Protocol):
    """Files by name, each complete or absent. Methods raise FileNotFoundError where there is no such file."""

    def sizes(self, prefix: str) -> dict[str, int]:
        """Bytes of each file whose name begins so, by its name; `prefix` begins with a kind, as in `turn_`."""
        ...

    def read(self, name: str) -> bytes:
        """The content of a file."""
        ...

    def write(self, name: str, content: bytes) -> None:
        """Make or replace a file."""
        ...

    def remove(self, name: str) -> None:
        """Delete a file."""
        ...


class MemoryFolder:
    """See Folder: nothing outlives the process."""

    def __init__(self) -> None:
        self._files: dict[str, bytes] = {}

    def sizes(self, prefix: str) -> dict[str, int]:
        """Bytes of each file whose name begins so."""
        return {name: len(content) for name, content in list(self._files.items()) if name.startswith(prefix)}

    def read(self, name: str) -> bytes:
        """The content of a file."""
        if name not in self._files:
            raise FileNotFoundError(name)
        return self._files[name]

    def write(self, name: str, content: bytes) -> None:
        """Make or replace a file."""
        self._files[name] = content

    def remove(self, name: str) -> None:
        """Delete a file."""
        self._files.pop(name, None)


class AddressFolder:
    """See Folder.

    Args:
        address: a path, or an address such as s3://bucket/folder, which needs the package that fsspec names for it.

    Raises:
        InputError: an address that cannot be opened.
    """

    def __init__(self, address: str) -> None:
        try:
            self._files, self._root = fsspec.core.url_to_fs(address)
            self._files.makedirs(self._root, exist_ok=True)
        except (ImportError, ValueError, OSError) as error:
            raise InputError(f"--sessions: {address} cannot be opened ({error})") from None
        self._is_local, self._made = isinstance(self._files, LocalFileSystem), set[str]()

    def sizes(self, prefix: str) -> dict[str, int]:
        """Bytes of each file whose name begins so; hidden ones, which are not complete, are left out."""
        folder = self._folder(prefix)
        entries = _local_files(folder) if self._is_local else self._files_below(folder)
        return {name: size for name, size in entries if name.startswith(prefix)}

    def _files_below(self, folder: str) -> Iterator[tuple[str, int]]:
        self._files.invalidate_cache()
        with contextlib.suppress(FileNotFoundError):
            for path, entry in self._files.find(folder, detail=True).items():
                yield path.rpartition("/")[2], int(entry["size"] or 0)

    def _folder(self, prefix: str) -> str:
        """Where all files are whose names begin so."""
        kind, _, characters = prefix.partition("_")
        return "/".join([self._root, kind, *([characters[:2]] if len(characters) > 1 else [])])

    def read(self, name: str) -> bytes:
        """The content of a file."""
        content: bytes = self._files.cat_file(f"{self._folder(name)}/{name}")
        return content

    def write(self, name: str, content: bytes) -> None:
        """Make or replace a file; elsewhere than on a disk a file appears when it is complete."""
        folder = self._folder(name)
        if folder not in self._made:
            self._files.makedirs(folder, exist_ok=True)
            self._made.add(folder)
        if self._is_local:
            write_whole(Path(folder, name), content)
        else:
            self._files.pipe_file(f"{folder}/{name}", content)

    def remove(self, name: str) -> None:
        """Delete a file."""
        self._files.rm_file(f"{self._folder(name)}/{name}")


def _local_files(folder: str) -> Iterator[tuple[str, int]]:
    """Names and bytes of all files below."""
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                yield name, os.stat(f"{parent}/{name}").st_size  # noqa: PTH116 - a Path for each takes longer
