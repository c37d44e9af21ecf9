"""Named files of a store: in a folder, at any other address that fsspec knows, or in memory."""

from pathlib import Path
from typing import Protocol

import fsspec
from fsspec.implementations.local import LocalFileSystem

from multilin.errors import InputError
from multilin.files import write_whole


class Folder(Protocol):
    """Files by name, each complete or absent. Methods raise FileNotFoundError where there is no such file."""

    def sizes(self) -> dict[str, int]:
        """Bytes of each file by its name."""
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

    def sizes(self) -> dict[str, int]:
        """Bytes of each file by its name."""
        return {name: len(content) for name, content in list(self._files.items())}

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
        self._is_local = isinstance(self._files, LocalFileSystem)

    def sizes(self) -> dict[str, int]:
        """Bytes of each file by its name; hidden ones, which are not complete, are left out."""
        self._files.invalidate_cache()
        entries = self._files.ls(self._root, detail=True)
        names = ((entry["name"].rpartition("/")[2], int(entry["size"] or 0)) for entry in entries)
        return {name: size for name, size in names if name and not name.startswith(".")}

    def read(self, name: str) -> bytes:
        """The content of a file."""
        content: bytes = self._files.cat_file(f"{self._root}/{name}")
        return content

    def write(self, name: str, content: bytes) -> None:
        """Make or replace a file; elsewhere than on a disk a file appears when it is complete."""
        path = f"{self._root}/{name}"
        if self._is_local:
            write_whole(Path(path), content)
        else:
            self._files.pipe_file(path, content)

    def remove(self, name: str) -> None:
        """Delete a file."""
        self._files.rm_file(f"{self._root}/{name}")
