"""The pieces in which windowed attention is computed: a few blocks of queries, each with the keys it reads."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

LARGEST_BLOCK = 64  # queries of a block; larger ones compare more pairs that no window holds
LARGEST_SHARE = 4  # but a wide window loses little by blocks of one in so many of it, whose products are faster
LARGEST_OF_ALL = 256
SMALLEST_BLOCK = 16  # below, the products are too small to be worth their calls
NUMBERS = {"cpu": 2**20}  # weights of a tile, 4 MB in float32: they stay in the cache between the steps
MOST_NUMBERS = 2**23  # of a tile with a wide window, where gradients of many keys would be added too often otherwise
MANY_NUMBERS = 2**26  # on devices that want much to do at a time


class Tile(NamedTuple):
    """`num_blocks` blocks of `block` queries after position `first`; block i reads `num_keys` keys from key i * block.

    batch: the rows of the batch.
    first: position of the first query among the new tokens.
    first_key: position of the first block's first key among all tokens, the state's included.
    """

    batch: slice
    first: int
    num_blocks: int
    block: int
    first_key: int
    num_keys: int

    @property
    def queries(self) -> tuple[slice, slice]:
        """The tile's queries in a tensor (B, T, ...)."""
        return self.batch, slice(self.first, self.first + self.num_blocks * self.block)

    @property
    def keys(self) -> tuple[slice, slice]:
        """The tile's keys in a tensor (B, S, ...)."""
        return self.batch, slice(self.first_key, self.first_key + (self.num_blocks - 1) * self.block + self.num_keys)


def block_size(num_new: int, num_heads: int, window: int, device: torch.device) -> int:
    """Queries of a block: about the window, fewer where the window is so wide that they alone would fill a tile."""
    largest = min(max(LARGEST_BLOCK, window // LARGEST_SHARE), LARGEST_OF_ALL)
    numbers = _num_weights(device) if largest == LARGEST_BLOCK else max(_num_weights(device), MOST_NUMBERS)
    wanted = numbers // (num_heads * max(window, 1)) // SMALLEST_BLOCK * SMALLEST_BLOCK
    return min(num_new, largest, max(min(wanted, window), SMALLEST_BLOCK))


def tiles(shape: torch.Size, num_read: int, window: int, block: int, device: torch.device) -> Iterator[Tile]:
    """Tiles of queries (B, T, H, D) after `num_read` tokens, in the order of time."""
    num_batch, num_new, num_heads = shape[:3]
    first = 0
    while first < num_new:
        size = min(block, num_new - first)
        cut = max(window - num_read - first, 0)  # keys of the window before the first token
        num_keys = window + size - cut
        num_blocks = 1
        if cut == 0:
            fit = _num_weights(device) // (num_heads * size * num_keys)
            num_blocks = max(1, min((num_new - first) // size, fit))
        fit = max(1, _num_weights(device) // (num_blocks * num_heads * size * num_keys))
        for row in range(0, num_batch, fit):
            batch = slice(row, min(row + fit, num_batch))
            yield Tile(batch, first, num_blocks, size, num_read + first - window + cut, num_keys)
        first += num_blocks * size


def _num_weights(device: torch.device) -> int:
    return NUMBERS.get(device.type, MANY_NUMBERS)


def query_blocks(x_BTHD: Tensor, tile: Tile, dtype: torch.dtype) -> Tensor:
    """The tile's queries as a batch of matrices (rows * blocks * heads, block, D)."""
    blocks_BNKHD = x_BTHD[tile.queries].to(dtype).unflatten(1, (tile.num_blocks, tile.block))
    return blocks_BNKHD.transpose(2, 3).flatten(0, 2)


def key_blocks(x_BSHD: Tensor, tile: Tile, dtype: torch.dtype) -> Tensor:
    """The tile's keys or values as a batch of matrices (rows * blocks * heads, num_keys, D)."""
    windows_BNHDL = x_BSHD[tile.keys].to(dtype).unfold(1, tile.num_keys, tile.block)
    return windows_BNHDL.transpose(3, 4).flatten(0, 2)


def write_query_blocks(blocks: Tensor, tile: Tile, total_BTHD: Tensor) -> None:
    """Write what belongs to the tile's queries where `query_blocks` read them."""
    num_heads = total_BTHD.shape[2]
    blocks_BNHKD = blocks.unflatten(0, (-1, tile.num_blocks, num_heads))
    total_BTHD[tile.queries].unflatten(1, (tile.num_blocks, tile.block)).copy_(blocks_BNHKD.transpose(2, 3))


def add_key_blocks(blocks: Tensor, tile: Tile, total_BSHD: Tensor) -> None:
    """Add what belongs to the tile's keys where `key_blocks` read them; blocks overlap by a window."""
    blocks_BNHLD = blocks.unflatten(0, (-1, tile.num_blocks, total_BSHD.shape[2]))
    region_BSHD = total_BSHD[tile.keys]
    if tile.num_blocks == 1:
        region_BSHD.add_(blocks_BNHLD[:, 0].transpose(1, 2))
        return
    for offset in range(0, tile.num_keys, tile.block):
        # Pieces of at most a block do not overlap, so that each target is written once.
        piece_BNHLD = blocks_BNHLD[:, :, :, offset : offset + tile.block]
        width = piece_BNHLD.shape[3]
        last = offset + (tile.num_blocks - 1) * tile.block + width
        targets_BNHDL = region_BSHD[:, offset:last].unfold(1, width, tile.block)
        targets_BNHDL.add_(piece_BNHLD.transpose(3, 4))
