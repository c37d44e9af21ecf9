"""Turns: a prompt, its answer and the state after them, kept in memory and on disk, and found by their tokens."""

import contextlib
import dataclasses
import json
import logging
import math
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from multilin.errors import InputError
from multilin.serving.folder import Folder, is_id

_MODULUS, _FACTOR = 2**61 - 1, 1_000_003_000_031  # hash that finds candidates, whose tokens are then compared
CLEANING = 60.0  # least seconds between two searches for turns to delete
LEFTOVER = 3600.0  # seconds after which an unfinished file, or a state without its turn, is deleted
log = logging.getLogger("multilin.serve")


@dataclass(frozen=True)
class Turn:
    """A prompt and its answer, which may continue an earlier turn. A turn is never changed.

    id: see `new_id`.
    owner: the user that the turn belongs to, as 16 hexadecimal digits.
    parent: id of the turn that this turn continues, or None.
    kind: "completion", "chat" or "import".
    prompt, text: the prompt and the answer.
    messages: all messages of the conversation, including this answer; None without messages or if they are unknown.
    token_ids: tokens of the whole text, without the first `num_unknown` tokens.
    num_read: number of tokens that the turn's state has read, including unknown tokens.
    num_unknown: number of tokens at the beginning of the text that are not known, as after importing a state.
    created: seconds since 1970.
    """

    id: str
    owner: str
    parent: str | None
    kind: str
    prompt: str
    text: str
    messages: list[dict[str, str]] | None
    token_ids: list[int]
    num_read: int
    num_unknown: int = 0
    created: float = field(default_factory=time.time)

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the whole text."""
        return self.num_unknown + len(self.token_ids)

    @property
    def unread_ids(self) -> list[int]:
        """Tokens that the state has not read."""
        return self.token_ids[self.num_read - self.num_unknown :]


class Entry(NamedTuple):
    """What the names and sizes of a turn's files say about the turn."""

    id: str
    owner: str
    num_read: int
    hash: int
    created: int
    size: int = 0
    state_size: int = 0

    @property
    def name(self) -> str:
        """Name of the turn's files, without the suffix."""
        return f"{self.id}.{self.owner}.{self.num_read}.{self.hash:x}.{self.created}"

    @classmethod
    def from_name(cls, name: str, sizes: Mapping[str, int]) -> "Entry | None":
        """Make the entry of a turn from the name of its .json file and the sizes of all files; None for other names."""
        match = re.fullmatch(r"(turn_[\w-]{22})\.([0-9a-f]{16})\.(\d+)\.([0-9a-f]+)\.(\d+)\.json", name)
        if match is None:
            return None
        state_size = sizes.get(f"{name.removesuffix('.json')}.safetensors", 0)
        size = sizes[name] + state_size
        return cls(match[1], match[2], int(match[3]), int(match[4], 16), int(match[5]), size, state_size)


class TurnStore:
    """A store of turns and their states. Its methods block, and are thread-safe.

    Args:
        folder: keeps all turns; None keeps them in memory and drops the least recently used.
        memory_bytes: largest total size of the states and texts in memory.
        disk_bytes: size of the folder beyond which the oldest turns are deleted; None for no limit.
        seconds: age at which turns are deleted; None deletes none because of age.
    """

    def __init__(
        self, folder: Folder | None, memory_bytes: int, disk_bytes: int | None = None, seconds: float | None = None
    ) -> None:
        self.folder, self.memory_bytes, self.disk_bytes, self.seconds = folder, memory_bytes, disk_bytes, seconds
        self._memory: OrderedDict[str, tuple[bytes, bytes]] = OrderedDict()
        self.num_bytes = 0
        self._entries: dict[str, Entry] = {}
        self._by_hash: dict[tuple[str, int, int], str] = {}
        self._lock, self._next_cleaning = threading.RLock(), math.inf
        self.clean()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, turn: Turn, state: bytes) -> None:
        """Store a turn. If the store has a folder, the turn is on disk when this method returns."""
        last_hash = 0
        if not turn.num_unknown:
            *_, last_hash = hashes(turn.token_ids[: turn.num_read])
        content = json.dumps(dataclasses.asdict(turn)).encode()
        size = len(content) + len(state)
        entry = Entry(turn.id, turn.owner, turn.num_read, last_hash, int(turn.created), size, len(state))
        if self.folder is not None:
            self.folder.write(f"{entry.name}.safetensors", state)
            self.folder.write(f"{entry.name}.json", content)
        with self._lock:
            self._know(entry)
            self._remember(turn.id, content, state)
        if time.monotonic() > self._next_cleaning:
            self._next_cleaning = math.inf
            threading.Thread(target=self.clean, name="multilin-clean", daemon=True).start()

    def get(self, owner: str, turn_id: str) -> tuple[Turn, bytes] | None:
        """Get a turn of this owner and its state; None if the turn does not exist.

        Raises:
            InputError: the files of the turn are damaged.
        """
        entry = self.entry(owner, turn_id)
        if entry is None:
            return None
        with self._lock:
            kept = self._memory.get(turn_id)
            if kept is not None:
                self._memory.move_to_end(turn_id)
        if kept is None:
            content, state = self._read(entry, "json"), self._read(entry, "safetensors")
            if content is None or state is None:
                return None
            kept = content, state
            with self._lock:
                if entry.id in self._entries:
                    self._remember(entry.id, *kept)
        return _parse(entry, kept[0]), kept[1]

    def peek(self, owner: str, turn_id: str) -> Turn | None:
        """Get a turn as `get` does, but without the turn's state."""
        entry = self.entry(owner, turn_id)
        if entry is None:
            return None
        kept = self._memory.get(turn_id)
        content = self._read(entry, "json") if kept is None else kept[0]
        return None if content is None else _parse(entry, content)

    def entry(self, owner: str, turn_id: str) -> Entry | None:
        """Get the entry of a turn of this owner; None if the turn does not exist."""
        if turn_id not in self._entries and is_id("turn", turn_id):
            self._list(turn_id)  # another server may have written it
        entry = self._entries.get(turn_id)
        return entry if entry is not None and entry.owner == owner else None

    def longest(self, owner: str, token_ids: Sequence[int]) -> tuple[Turn, bytes] | None:
        """Find the turn whose state has read the longest proper prefix of these tokens; None if there is none."""
        keys = [(owner, count, value) for count, value in enumerate(hashes(token_ids[:-1]), 1)]
        for turn_id in [found for key in reversed(keys) if (found := self._by_hash.get(key)) is not None]:
            with contextlib.suppress(InputError):  # damaged files count as missing
                kept = self.get(owner, turn_id)
                if kept is not None and kept[0].token_ids[: kept[0].num_read] == list(token_ids[: kept[0].num_read]):
                    return kept
        return None

    def remove(self, owner: str, turn_id: str) -> None:
        """Delete a turn of this owner if it exists."""
        entry = self.entry(owner, turn_id)
        if entry is not None:
            self._delete(entry)

    def clean(self) -> None:
        """List the folder. Delete turns that are too old, then the oldest turns until the folder is small enough."""
        begin = time.monotonic()
        try:
            self._remove_leftovers(self._list("turn_"))
            with self._lock:
                entries = sorted(self._entries.values(), key=lambda entry: entry.created)
            total = sum(entry.size for entry in entries)
            oldest = 0 if self.seconds is None else time.time() - self.seconds
            most = math.inf if self.folder is None or self.disk_bytes is None else self.disk_bytes
            for entry in entries:
                if entry.created >= oldest and total <= most:
                    break
                total -= entry.size
                self._delete(entry)
        finally:
            now = time.monotonic()
            self._next_cleaning = now + max(CLEANING, 20 * (now - begin))  # a large store is listed less often

    def _read(self, entry: Entry, suffix: str) -> bytes | None:
        if self.folder is None:
            return None
        content = self.folder.read(f"{entry.name}.{suffix}")
        if content is None:  # another server has deleted it
            self._forget(entry)
        return content

    def _remove_leftovers(self, sizes: Mapping[str, int]) -> None:
        """Delete unfinished files and states without a turn, and forget turns that other servers deleted."""
        if self.folder is None:
            return
        with self._lock:
            entries = list(self._entries.values())
        for entry in entries:
            if f"{entry.name}.json" not in sizes and entry.created < time.time() - LEFTOVER:
                self._forget(entry)
        self.folder.remove_unfinished(LEFTOVER)
        for name in sizes:
            content = name.removesuffix(".safetensors") + ".json"
            lost = None if content in sizes else Entry.from_name(content, {content: 0})
            if lost is not None and lost.created < time.time() - LEFTOVER:
                self.folder.remove(name)

    def _list(self, prefix: str) -> Mapping[str, int]:
        """Add the turns in the folder whose ids begin with `prefix`, and return the sizes of their files."""
        sizes = {} if self.folder is None else self.folder.sizes(prefix)
        found = [Entry.from_name(name, sizes) for name in sizes]
        with self._lock:
            for entry in found:
                if entry is not None and entry.id not in self._entries:
                    self._know(entry)
        return sizes

    def _know(self, entry: Entry) -> None:
        self._entries[entry.id] = entry
        if entry.hash:
            self._by_hash[entry.owner, entry.num_read, entry.hash] = entry.id

    def _forget(self, entry: Entry) -> None:
        with self._lock:
            self._entries.pop(entry.id, None)
            key = entry.owner, entry.num_read, entry.hash
            if self._by_hash.get(key) == entry.id:
                del self._by_hash[key]
            self.num_bytes -= sum(map(len, self._memory.pop(entry.id, ())))

    def _delete(self, entry: Entry) -> None:
        self._forget(entry)
        if self.folder is not None:
            self.folder.remove(f"{entry.name}.json")
            self.folder.remove(f"{entry.name}.safetensors")

    def _remember(self, turn_id: str, content: bytes, state: bytes) -> None:
        """Keep a turn in memory; drop the least recently used turns while all together exceed `memory_bytes`."""
        if turn_id not in self._memory:
            self._memory[turn_id] = content, state
            self.num_bytes += len(content) + len(state)
        while self.num_bytes > self.memory_bytes and len(self._memory) > 1:
            oldest = next(iter(self._memory))
            if self.folder is None:
                self._forget(self._entries[oldest])
            else:
                self.num_bytes -= sum(map(len, self._memory.pop(oldest)))


def _parse(entry: Entry, content: bytes) -> Turn:
    try:
        values = json.loads(content)
        values.pop("answer", None)  # earlier versions wrote this field
        return Turn(**values)
    except (ValueError, TypeError, AttributeError) as error:
        log.warning("%s.json is damaged: %s", entry.name, error)
        raise InputError(f"turn: the files of {entry.id} are damaged") from None


def hashes(token_ids: Sequence[int]) -> Iterator[int]:
    """Yield positive hashes of the first token, of the first two tokens, and so on."""
    value = 1
    for token in token_ids:
        value = (value * _FACTOR + token + 1) % _MODULUS or 1
        yield value
