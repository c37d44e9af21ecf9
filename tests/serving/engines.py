"""Engines for tests: one that writes what it is told, and one that counts, waits and fails around another."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Watched:
    """Another engine, of which every reading is noted.

    Args:
        engine: that works.
        seconds: that each reading takes longer.
    """

    def __init__(self, engine: Any, seconds: float = 0.0) -> None:
        self.engine, self.seconds, self.num_read_tokens = engine, seconds, 0
        self.before: Callable[[], None] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def read(self, state: Any, token_ids: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        if self.before is not None:
            self.before()
        time.sleep(self.seconds)
        self.num_read_tokens += sum(map(len, token_ids))
        return self.engine.read(state, token_ids)


class Script:
    """Another engine, whose model begins to write one text after any prompt and comes to no end."""

    def __init__(self, engine: Any, token_ids: list[int]) -> None:
        self.engine, self.token_ids = engine, token_ids
        self._begun: dict[int, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def read(self, state: Any, token_ids: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        logits = self.engine.read(state, token_ids)
        for row, (ids, count) in enumerate(zip(token_ids, self.engine.num_read(state), strict=True)):
            first = self._begun.setdefault(0, count) if len(ids) > 1 or not self._begun else self._begun[0]
            logits[row] = -100.0
            logits[row, self.token_ids[(count - first) % len(self.token_ids)]] = 100.0
        return logits
