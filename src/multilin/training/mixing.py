"""The order in which training reads the blocks of a mixture of texts."""

from collections.abc import Sequence

import numpy as np

from multilin.data.prepared import MixedBlocks
from multilin.training.order import BlockOrder

WINDOW = 1000
"""Blocks among which every text has its share."""


class MixedOrder(BlockOrder):
    """Like BlockOrder, with texts in proportion to their weights.

    Every thousand positions hold each text as often as its share says, to the nearest whole number and at least
    once, in an order that follows from the seed. The blocks of one text come in the BlockOrder of
    that text, so a text that has few blocks for its weight begins again while another has not ended.
    """

    def __init__(self, blocks: MixedBlocks, *, seed: int, length: int, fields: Sequence[str]) -> None:
        super().__init__(blocks, seed=seed, length=length, fields=fields)
        self._orders = [BlockOrder(part, seed=seed, length=length, fields=fields) for part in blocks.parts]
        self._offsets = np.cumsum([0, *map(len, blocks.parts)])
        self._counts = shares(blocks.weights, WINDOW)
        self._window: tuple[int, np.ndarray, np.ndarray] | None = None

    def block_index(self, position: int) -> int:
        """Which block is read at a position, counted through all texts."""
        window, offset = divmod(position, int(self._counts.sum()))
        texts, ranks = self._of_window(window)
        text = int(texts[offset])
        rank = window * int(self._counts[text]) + int(ranks[offset])
        return int(self._offsets[text]) + self._orders[text].block_index(rank)

    def _of_window(self, window: int) -> tuple[np.ndarray, np.ndarray]:
        """The text at each position of a window, and how many positions before have the same text."""
        if self._window is None or self._window[0] != window:
            texts = np.repeat(np.arange(len(self._counts)), self._counts)
            texts = np.random.default_rng([self.seed, window]).permutation(texts)
            is_text = texts[:, None] == np.arange(len(self._counts))
            ranks = np.take_along_axis(np.cumsum(is_text, axis=0), texts[:, None], axis=1)[:, 0] - 1
            self._window = window, texts, ranks
        return self._window[1:]


def shares(weights: Sequence[float], total: int) -> np.ndarray:
    """Whole numbers of sum `total` in proportion to weights: largest remainders are rounded up, none is 0."""
    exact = np.asarray(weights) / np.sum(weights) * total
    counts: np.ndarray = np.maximum(np.floor(exact).astype(int), 1)
    for place in np.argsort(counts - exact, kind="stable")[: max(total - int(counts.sum()), 0)]:
        counts[place] += 1
    return counts
