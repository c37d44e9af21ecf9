"""Files in a folder or at an address of fsspec. Files at an address are copied to this machine when they are read."""

import contextlib
import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

import fsspec
from filelock import FileLock
from fsspec.implementations.local import LocalFileSystem

from multilin.errors import InputError, as_input_error, shown
from multilin.files import atomic_folder, check_folder, checksum, remove_partials, write_whole
from multilin.settings.inputs import check_regular

ATTEMPTS, FIRST_WAIT = 4, 0.5  # calls over the network until one succeeds; seconds before the second, then doubled
_LASTING = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError, FileExistsError)
ResultT = TypeVar("ResultT")


def cache_root() -> Path:
    """Where prepared texts are kept: $XDG_CACHE_HOME/multilin, or ~/.cache/multilin."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "multilin")


def make_once(folder: Path, make: Callable[[Path], None]) -> None:
    """If a folder does not exist, create it and let `make` fill it; other processes wait for the folder meanwhile.

    Raises:
        InputError: the folder cannot be written, or `make` fails. After an error, the folder does not exist.
    """
    try:
        if folder.exists():
            return
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                remove_partials(folder.parent, folder.name)
                with atomic_folder(folder) as unfinished:
                    make(unfinished)
    except OSError as error:
        raise InputError(
            f"the data cache {folder.parent} cannot be written ({error.strerror or error}); set XDG_CACHE_HOME to a "
            "folder with room"
        ) from error


class Store:
    """Named files below an address, each complete or absent.

    Args:
        field: the setting that gave the address; messages begin with it.
        address: a path, or an address such as s3://bucket/folder. fsspec needs a package for each kind of address.

    Raises:
        InputError: fsspec does not know the kind of address, or the package for this kind is missing.
    """

    def __init__(self, field: str, address: str) -> None:
        self.field, self.address = field, address
        with as_input_error(lambda reason: f"{field}: {shown(address)} cannot be opened ({reason})"):
            self._files, self._root = fsspec.core.url_to_fs(address)
        self.local = Path(self._root) if isinstance(self._files, LocalFileSystem) else None

    def check_writable(self) -> None:
        """Raise, before any work, if files cannot be written to the address.

        Raises:
            InputError: the address cannot be written.
        """
        if self.local is not None:
            check_folder(self.field, self.local)
        else:
            with as_input_error(lambda reason: f"{self.field}: {shown(self.address)} cannot be written ({reason})"):
                self.write("unfinished/probe", b"")
                self.remove("unfinished/probe")

    def read(self, name: str) -> bytes | None:
        """The content of a file, or None if there is no such file."""
        if self.local is not None and (self.local / name).exists():
            check_regular(self.local / name, self.field)
        try:
            content: bytes = insist(partial(self._files.cat_file, f"{self._root}/{name}"))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return content

    def write(self, name: str, content: bytes) -> None:
        """Make or replace a file."""
        if self.local is not None:
            (self.local / name).parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.local / name, content)
        else:
            insist(partial(self._files.pipe_file, f"{self._root}/{name}", content))

    @contextlib.contextmanager
    def new_folder(self, name: str) -> Iterator[Path]:
        """Context that yields an empty local folder. At the end, files in this folder are stored below `name`."""
        if self.local is not None:
            with atomic_folder(self.local / name) as folder:
                yield folder
            return
        with tempfile.TemporaryDirectory() as made:
            yield Path(made)
            for file in sorted(Path(made).iterdir()):
                insist(partial(self._files.put_file, str(file), f"{self._root}/{name}/{file.name}"))

    def fetch(self, name: str, sums: Mapping[str, str], cache: Path) -> Path:
        """A local folder with copies of the files of folder `name`; the copies are compared with their SHA-256.

        Copies are kept in a cache, which several processes may share.

        Raises:
            InputError: a file is missing or does not match its checksum, or the cache cannot be written.
        """
        if self.local is not None:
            return self.local / name
        folder = cache / hashlib.sha256(repr(sorted(sums.items())).encode()).hexdigest()[:32]
        make_once(folder, partial(self._copy_all, name, sums))
        return folder

    def _copy_all(self, name: str, sums: Mapping[str, str], folder: Path) -> None:
        with as_input_error(lambda reason: f"{self.field}: {self.address}/{name} cannot be read ({reason})"):
            for file in sums:
                insist(partial(self._files.get_file, f"{self._root}/{name}/{file}", str(folder / file)))
        check_files(self.field, folder, sums)

    def names(self, folder: str) -> set[str]:
        """The names of the files in a folder; none if the folder does not exist."""
        self._files.invalidate_cache()  # a cached list lacks files that other processes wrote since
        try:
            entries = insist(partial(self._files.ls, f"{self._root}/{folder}", detail=False))
        except (FileNotFoundError, NotADirectoryError):
            return set()
        return {str(entry).rpartition("/")[2] for entry in entries}

    def remove(self, name: str) -> None:
        """Delete a file or folder, if it exists."""
        self._files.invalidate_cache()
        with contextlib.suppress(FileNotFoundError):
            insist(partial(self._files.rm, f"{self._root}/{name}", recursive=True))


def check_files(field: str, folder: Path, sums: Mapping[str, str]) -> None:
    """Compare files with their checksums.

    Raises:
        InputError: a file is missing, or does not match its checksum.
    """
    for name, expected in sums.items():
        path = folder / name
        if not path.is_file():
            raise InputError(f"{field}: {shown(str(path))} is missing, but the manifest names it")
        if checksum(path) != expected:
            raise InputError(f"{field}: {shown(str(path))} is damaged: its checksum differs from the manifest's")


def insist(call: Callable[[], ResultT]) -> ResultT:
    """The result of a call over the network; the call is repeated a few times if it fails."""
    for attempt in range(ATTEMPTS - 1):
        try:
            return call()
        except _LASTING:
            raise
        except Exception:  # each store's client has other errors
            time.sleep(FIRST_WAIT * 2**attempt)
    return call()
