"""Sessions, which are lists of turns, each of which continues the one before; and the files that a server keeps."""

import contextlib
import dataclasses
import json
import re
import secrets
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import partial

from multilin.data.store import Store, insist
from multilin.errors import as_input_error, shown

NOBODY = "0" * 16  # owner of all turns where there are no keys
MOST_IN_MEMORY = 10_000  # sessions


def new_id(kind: str) -> str:
    """An id that cannot be guessed: turn_ or session_ and 128 random bits."""
    return f"{kind}_{secrets.token_urlsafe(16)}"


def is_id(kind: str, text: str) -> bool:
    """True if a text has the form of `new_id(kind)`."""
    return re.fullmatch(rf"{kind}_[A-Za-z0-9_-]{{22}}", text) is not None


class Folder(Store):
    """Files by name, each complete or absent.

    A name begins with a kind and random characters, as in turn_4fK.... The files of a kind are spread over subfolders
    by the first two of these characters, so that each subfolder stays small.

    Args:
        address: see `Store`; None keeps the files in memory, where they end with the process.

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
        """The bytes of each file whose name begins with `prefix`, which begins with a kind as in `turn_`."""
        self._files.invalidate_cache()
        try:
            entries = insist(partial(self._files.find, f"{self._root}/{_subfolder(prefix)}", detail=True))
        except FileNotFoundError:
            return {}
        sizes = {path.rpartition("/")[2]: int(entry["size"] or 0) for path, entry in entries.items()}
        return {name: size for name, size in sizes.items() if name.startswith(prefix)}

    def read(self, name: str) -> bytes | None:
        """The content of a file; None where there is none."""
        return super().read(f"{_subfolder(name)}/{name}")

    def write(self, name: str, content: bytes) -> None:
        """Make or replace a file."""
        folder = _subfolder(name)
        if folder not in self._made:
            self._files.makedirs(f"{self._root}/{folder}", exist_ok=True)
            self._made.add(folder)
        super().write(f"{folder}/{name}", content)

    def remove_unfinished(self, seconds: float) -> None:
        """Delete the hidden files that servers were writing when they were killed, more than so many seconds ago."""
        for path in () if self.local is None else self.local.rglob(".*.partial"):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime < time.time() - seconds:
                    path.unlink()

    def remove(self, name: str) -> None:
        """Delete a file, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            insist(partial(self._files.rm_file, f"{self._root}/{_subfolder(name)}/{name}"))


def _subfolder(prefix: str) -> str:
    """The folder of all files whose names begin with `prefix`."""
    kind, _, characters = prefix.partition("_")
    return f"{kind}/{characters[:2]}" if len(characters) > 1 else kind


@dataclass
class Session:
    """A conversation or text that grows.

    id, owner: see `Turn`.
    turns: ids of the session's turns; the last one is continued.
    created, changed: seconds since 1970.
    """

    id: str
    owner: str
    turns: list[str] = field(default_factory=list)
    created: float = field(default_factory=time.time)
    changed: float = field(default_factory=time.time)

    @property
    def name(self) -> str:
        """Name of the session's file."""
        return f"{self.id}.{self.owner}.json"


class SessionStore:
    """Sessions in a folder. Methods wait for the disk; any thread may call them.

    Args:
        folder: keeps all sessions; with None there are only those in memory, the last `MOST_IN_MEMORY` that were
            changed.

    Attributes:
        sharing: held where a session gets turns that there are, and where turns that no session has are deleted.
    """

    def __init__(self, folder: Folder | None) -> None:
        self._folder = folder or Folder()
        self._in_memory = OrderedDict[str, None]() if folder is None else None  # names, the last changed last
        self._lock, self.sharing = threading.Lock(), threading.Lock()

    def create(self, owner: str, turns: list[str]) -> Session:
        """A new session."""
        session = Session(new_id("session"), owner, turns)
        self.save(session)
        return session

    def save(self, session: Session) -> None:
        """Write a session that was changed."""
        session.changed = time.time()
        self._folder.write(session.name, json.dumps(dataclasses.asdict(session)).encode())
        if self._in_memory is not None:
            with self._lock:
                self._in_memory[session.name] = None
                self._in_memory.move_to_end(session.name)
                while len(self._in_memory) > MOST_IN_MEMORY:
                    self._folder.remove(self._in_memory.popitem(last=False)[0])

    def get(self, owner: str, session_id: str) -> Session | None:
        """A session of this owner; None if there is none."""
        if not is_id("session", session_id):
            return None
        return self._read(Session(session_id, owner).name)

    def all(self, owner: str) -> list[Session]:
        """All sessions of an owner, the last changed first."""
        names = [name for name in self._folder.sizes("session_") if name.endswith(f".{owner}.json")]
        sessions = [session for name in names if (session := self._read(name)) is not None]
        return sorted(sessions, key=lambda session: -session.changed)

    def remove(self, session: Session) -> None:
        """Delete a session, not its turns."""
        self._folder.remove(session.name)
        if self._in_memory is not None:
            with self._lock:
                self._in_memory.pop(session.name, None)

    def _read(self, name: str) -> Session | None:
        try:
            return Session(**json.loads(self._folder.read(name) or b""))
        except (ValueError, TypeError):
            return None
