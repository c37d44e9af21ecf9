"""Sessions: lists of turns, each of which continues the turn before it."""

import dataclasses
import json
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field

from multilin.serving.folder import Folder, is_id, new_id

NOBODY = "0" * 16  # owner of all requests without a key
MOST_IN_MEMORY = 10_000  # sessions


@dataclass
class Session:
    """A conversation or a text that grows by turns.

    id, owner: see `Turn`.
    turns: ids of the session's turns; a request continues the last turn.
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
    """A store of sessions in a folder or in memory. Its methods block, and are thread-safe.

    Args:
        folder: keeps all sessions; None keeps the `MOST_IN_MEMORY` most recently changed sessions in memory.

    Attributes:
        sharing: a lock for adding existing turns to a session, and for deleting turns that no session has.
    """

    def __init__(self, folder: Folder | None) -> None:
        self._folder = folder or Folder()
        self._in_memory = OrderedDict[str, None]() if folder is None else None  # names, ordered by the last change
        self._lock, self.sharing = threading.Lock(), threading.Lock()

    def create(self, owner: str, turns: list[str]) -> Session:
        """Create a session."""
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
        """Get a session of this owner; None if it does not exist."""
        if not is_id("session", session_id):
            return None
        return self._read(Session(session_id, owner).name)

    def all(self, owner: str) -> list[Session]:
        """All sessions of an owner, the most recently changed first."""
        names = [name for name in self._folder.sizes("session_") if name.endswith(f".{owner}.json")]
        sessions = [session for name in names if (session := self._read(name)) is not None]
        return sorted(sessions, key=lambda session: -session.changed)

    def remove(self, session: Session) -> None:
        """Delete a session, but not its turns."""
        self._folder.remove(session.name)
        if self._in_memory is not None:
            with self._lock:
                self._in_memory.pop(session.name, None)

    def _read(self, name: str) -> Session | None:
        try:
            return Session(**json.loads(self._folder.read(name) or b""))
        except (ValueError, TypeError):
            return None
