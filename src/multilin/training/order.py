"""The order in which training reads blocks. The seed decides the order, so a resumed run continues exactly."""

from collections.abc import Sequence

import numpy as np
import torch
from torch.utils.data import Dataset

from multilin.data.packed_text import Blocks
from multilin.data.prepared import ConcatBlocks, MixedBlocks
from multilin.data.tasks import TaskBlocks

WINDOW = 1000
"""Number of consecutive blocks in which each text of a mixture has a share of the blocks that fits its weight."""


class BlockOrder(Dataset[dict[str, torch.Tensor]]):
    """All blocks that a run reads, in order: passes over the text, each shuffled anew.

    The block at a position does not depend on the blocks read before, nor on the number of devices. So a resumed run
    finds its next batch by skipping positions. A batch may reach into the next pass, so every batch is full.
    """

    def __init__(
        self, blocks: Blocks | ConcatBlocks | TaskBlocks, *, seed: int, length: int, fields: Sequence[str]
    ) -> None:
        self.blocks, self.seed, self.length, self.fields = blocks, seed, length, fields
        self._passes: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, position: int) -> dict[str, torch.Tensor]:
        block = self.blocks[self.block_index(position)]
        return {name: block[name] for name in self.fields}

    def block_index(self, position: int) -> int:
        """The index of the block at a position."""
        number, offset = divmod(position, len(self.blocks))
        if number not in self._passes:
            # Two passes are enough: a batch reaches at most into the next pass, unless the text is tiny.
            self._passes = {n: order for n, order in self._passes.items() if n == number - 1}
            self._passes[number] = np.random.default_rng([self.seed, number]).permutation(len(self.blocks))
        return int(self._passes[number][offset])

    def describe(self, start: int, end: int) -> str:
        """The blocks at positions start <= p < end, for a message."""
        blocks = [self.block_index(position) for position in range(start, end)]
        shown = ", ".join(map(str, blocks[:8])) + (", ..." if len(blocks) > 8 else "")
        return f"{'block' if len(blocks) == 1 else 'blocks'} {shown} of the training text"


class MixedOrder(BlockOrder):
    """A BlockOrder of a mixture of texts, in proportion to their weights.

    Every `WINDOW` positions hold blocks of each text in proportion to its weight (rounded, at least one block). The
    seed decides the order of these blocks. Each text has its own BlockOrder, so a text with few blocks for its weight
    begins again before another text has ended.
    """

    def __init__(self, blocks: MixedBlocks, *, seed: int, length: int, fields: Sequence[str]) -> None:
        super().__init__(blocks, seed=seed, length=length, fields=fields)
        self._orders = [BlockOrder(part, seed=seed, length=length, fields=fields) for part in blocks.parts]
        self._offsets = np.cumsum([0, *map(len, blocks.parts)])
        self._counts = shares(blocks.weights, WINDOW)
        self._window: tuple[int, np.ndarray, np.ndarray] | None = None

    def block_index(self, position: int) -> int:
        """The index of the block at a position; indices count the blocks of all texts."""
        window, offset = divmod(position, int(self._counts.sum()))
        texts, ranks = self._of_window(window)
        text = int(texts[offset])
        rank = window * int(self._counts[text]) + int(ranks[offset])
        return int(self._offsets[text]) + self._orders[text].block_index(rank)

    def _of_window(self, window: int) -> tuple[np.ndarray, np.ndarray]:
        """For each position of a window: its text, and how many earlier positions of the window have the same text."""
        if self._window is None or self._window[0] != window:
            texts = np.repeat(np.arange(len(self._counts)), self._counts)
            texts = np.random.default_rng([self.seed, window]).permutation(texts)
            is_text = texts[:, None] == np.arange(len(self._counts))
            ranks = np.take_along_axis(np.cumsum(is_text, axis=0), texts[:, None], axis=1)[:, 0] - 1
            self._window = window, texts, ranks
        return self._window[1:]


def shares(weights: Sequence[float], total: int) -> np.ndarray:
    """Positive integers of sum `total` in proportion to weights; the largest remainders are rounded up."""
    exact = np.asarray(weights) / np.sum(weights) * total
    counts: np.ndarray = np.maximum(np.floor(exact).astype(int), 1)
    for place in np.argsort(counts - exact, kind="stable")[: max(total - int(counts.sum()), 0)]:
        counts[place] += 1
    return counts
