"""A store of the server's files, in a folder on this machine or at any address that fsspec supports."""

import contextlib
import re
import secrets
import time
from functools import partial

from multilin.data.store import Store, insist
from multilin.errors import as_input_error, shown


def new_id(kind: str) -> str:
    """Make an id that cannot be guessed: `kind`, an underscore and 128 random bits."""
    return f"{kind}_{secrets.token_urlsafe(16)}"


def is_id(kind: str, text: str) -> bool:
    """True if a text has the form of an id that `new_id(kind)` makes."""
    return re.fullmatch(rf"{kind}_[A-Za-z0-9_-]{{22}}", text) is not None


class Folder(Store):
    """A folder of files, or an address that stores files. A reader never sees an incomplete file.

    The name of a file begins with a kind and random characters, such as turn_4fK. The first two of these characters
    give the subfolder of the file, so that each subfolder stays small.

    Args:
        address: see `Store`; None keeps the files in memory until the process ends.

    Raises:
        InputError: an address that cannot be opened, or a folder that cannot be written.
    """

    def __init__(self, address: str | None = None) -> None:
        super().__init__("--sessions", address or f"memory://{secrets.token_hex(8)}")
        if self.local is not None:
            self.check_writable()
        with as_input_error(lambda reason: f"{self.field}: {shown(self.address)} cannot be opened ({reason})"):
            self._files.makedirs(self._root, exist_ok=True)
        self._made = set[str]()

    def sizes(self, prefix: str) -> dict[str, int]:
        """The sizes of all files whose names begin with `prefix`, such as `turn_` or a longer prefix."""
        self._files.invalidate_cache()
        try:
            entries = insist(partial(self._files.find, f"{self._root}/{_subfolder(prefix)}", detail=True))
        except FileNotFoundError:
            return {}
        sizes = {path.rpartition("/")[2]: int(entry["size"] or 0) for path, entry in entries.items()}
        return {name: size for name, size in sizes.items() if name.startswith(prefix)}

    def read(self, name: str) -> bytes | None:
        """The content of a file; None if the file does not exist."""
        return super().read(f"{_subfolder(name)}/{name}")

    def write(self, name: str, content: bytes) -> None:
        """Make or replace a file."""
        folder = _subfolder(name)
        if folder not in self._made:
            self._files.makedirs(f"{self._root}/{folder}", exist_ok=True)
            self._made.add(folder)
        super().write(f"{folder}/{name}", content)

    def remove_unfinished(self, seconds: float) -> None:
        """Delete hidden files older than `seconds`: unfinished files of servers that were killed."""
        for path in () if self.local is None else self.local.rglob(".*.partial"):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime < time.time() - seconds:
                    path.unlink()

    def remove(self, name: str) -> None:
        """Delete a file if it exists."""
        with contextlib.suppress(FileNotFoundError):
            insist(partial(self._files.rm_file, f"{self._root}/{_subfolder(name)}/{name}"))


def _subfolder(prefix: str) -> str:
    """The subfolder of all files whose names begin with `prefix`."""
    kind, _, characters = prefix.partition("_")
    return f"{kind}/{characters[:2]}" if len(characters) > 1 else kind
