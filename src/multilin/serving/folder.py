"""Named files in a folder of this machine, or at any other address that fsspec knows."""

import contextlib
import secrets
from functools import partial
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem

from multilin.data.store import insist
from multilin.errors import InputError
from multilin.files import write_whole


class Folder:
    """Files by name, each complete or absent.

    A name begins with a kind and random characters, as in turn_4fK.... The files of a kind are spread over subfolders
    by the first two of these characters, so that each subfolder stays small.

    Args:
        address: a path, or an address such as s3://bucket/folder, which needs the package that fsspec names for it;
            None keeps the files in memory, where they end with the process.

    Raises:
        InputError: an address that cannot be opened.
    """

    def __init__(self, address: str | None = None) -> None:
        address = address or f"memory://{secrets.token_hex(8)}"
        try:
            self._files, self._root = fsspec.core.url_to_fs(address)
            self._files.makedirs(self._root, exist_ok=True)
        except (ImportError, ValueError, OSError) as error:
            raise InputError(f"--sessions: {address} cannot be opened ({error})") from None
        self._is_local, self._made = isinstance(self._files, LocalFileSystem), set[str]()

    def sizes(self, prefix: str) -> dict[str, int]:
        """The bytes of each file whose name begins with `prefix`, which begins with a kind as in `turn_`."""
        self._files.invalidate_cache()
        try:
            entries = self._files.find(self._subfolder(prefix), detail=True)
        except FileNotFoundError:
            return {}
        sizes = {path.rpartition("/")[2]: int(entry["size"] or 0) for path, entry in entries.items()}
        return {name: size for name, size in sizes.items() if name.startswith(prefix)}

    def _subfolder(self, prefix: str) -> str:
        """The folder of all files whose names begin with `prefix`."""
        kind, _, characters = prefix.partition("_")
        return "/".join([self._root, kind, *([characters[:2]] if len(characters) > 1 else [])])

    def read(self, name: str) -> bytes:
        """The content of a file.

        Raises:
            FileNotFoundError: there is no file of this name.
        """
        content: bytes = insist(partial(self._files.cat_file, f"{self._subfolder(name)}/{name}"))
        return content

    def write(self, name: str, content: bytes) -> None:
        """Make or replace a file."""
        folder = self._subfolder(name)
        if folder not in self._made:
            self._files.makedirs(folder, exist_ok=True)
            self._made.add(folder)
        if self._is_local:
            write_whole(Path(folder, name), content)
        else:  # other stores show a file when it is complete
            insist(partial(self._files.pipe_file, f"{folder}/{name}", content))

    def remove(self, name: str) -> None:
        """Delete a file, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(f"{self._subfolder(name)}/{name}")
