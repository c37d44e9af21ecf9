"""The order in which training reads its blocks: known for every step, before and after a stop."""

from collections.abc import Sequence

import numpy as np
import torch
from torch.utils.data import Dataset

from multilin.data.packed_text import Blocks
from multilin.data.prepared import ConcatBlocks
from multilin.data.task_text import TaskBlocks


class BlockOrder(Dataset[dict[str, torch.Tensor]]):
    """All blocks a run reads, from the first to the last: one freshly shuffled pass over the text after another.

    Position p holds the same block whatever was read before, on however many devices, so that a run resumes at
    the exact batch by skipping positions. A batch may reach from one pass into the next; none is ever short.
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
        """Which block of the text is read at a position."""
        number, offset = divmod(position, len(self.blocks))
        if number not in self._passes:
            # Two passes are enough: a batch reaches into the next one at most, unless the text is tiny.
            self._passes = {n: order for n, order in self._passes.items() if n == number - 1}
            self._passes[number] = np.random.default_rng([self.seed, number]).permutation(len(self.blocks))
        return int(self._passes[number][offset])

    def describe(self, start: int, end: int) -> str:
        """The blocks at positions start <= p < end, for a message."""
        blocks = [self.block_index(position) for position in range(start, end)]
        shown = ", ".join(map(str, blocks[:8])) + (", ..." if len(blocks) > 8 else "")
        return f"{'block' if len(blocks) == 1 else 'blocks'} {shown} of the training text"
