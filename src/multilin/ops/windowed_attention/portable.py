"""Windowed attention in linear time by PyTorch operations: tiles of queries against the keys in their windows.

A tile's weights are computed, used and dropped while they are in the cache, and computed again backward. No query of a
block reads the block's last key, so that column serves as an extra key of value 0. With logit 0, it is the null key.
With the lowest finite logit, it takes all the weight of a query that reads nothing. So one softmax covers every case.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from multilin.ops.kernels import MANY_NUMBERS, refuse_second_derivative
from multilin.ops.ring import Ring
from multilin.ops.softmax import softmax
from multilin.ops.windowed_attention import reference
from multilin.ops.windowed_attention.reference import WindowedAttentionState, all_tokens, last_tokens, texts

SHORT = 8  # up to this number of tokens the reference is faster
LARGEST_BLOCK = 64  # queries of a block; larger blocks compute more pairs outside of windows
LARGEST_SHARE = 4  # blocks may be a fourth of a wide window: they waste little, and products are faster
LARGEST_OF_ALL = 256
SMALLEST_BLOCK = 16  # products of smaller blocks are not worth their calls
NUMBERS = {"cpu": 2**20}  # weights of a tile, 4 MB in float32: they stay in the cache between the steps
MOST_NUMBERS = 2**23  # the same with a wide window: smaller tiles would add to the gradient of a key too often


class Tile(NamedTuple):
    """A tile: `num_blocks` blocks of `block` queries from position `first` on; each block reads `num_keys` keys."""

    batch: slice  # the rows of the batch
    first: int  # position of the first query among the new tokens
    num_blocks: int
    block: int
    first_key: int  # position of the first block's first key among all tokens, the state's included
    num_keys: int

    @property
    def queries(self) -> tuple[slice, slice]:
        """The tile's queries in a tensor (B, T, ...)."""
        return self.batch, slice(self.first, self.first + self.num_blocks * self.block)

    @property
    def keys(self) -> tuple[slice, slice]:
        """The tile's keys in a tensor (B, S, ...)."""
        return self.batch, slice(self.first_key, self.first_key + (self.num_blocks - 1) * self.block + self.num_keys)


def windowed_attention(
    queries_BTHD: Tensor, keys_BTHD: Tensor, values_BTHE: Tensor, *, window: int, scale: float = 1.0,
    slope: float | Tensor = 0.0, hyper: float | Tensor = 0.0, null_key: bool = False, padding: Tensor | None = None,
    state: WindowedAttentionState | None = None, starts: Tensor | None = None, needs_state: bool = True,
) -> tuple[Tensor, WindowedAttentionState | None]:  # fmt: skip
    """See `multilin.ops.windowed_attention`; the window must be at least 1."""
    keys, values, logits_BS = all_tokens(queries_BTHD, keys_BTHD, values_BTHE, padding, state)
    num_new, num_all = queries_BTHD.shape[1], keys.shape[1]
    reach = min(window, num_all)
    block = block_size(num_new, keys.shape[2], reach, keys.device)
    offset_K, offset_L = (torch.arange(n, device=keys.device) for n in (block, block + reach))
    distance_KL = offset_K[:, None] + reach - offset_L[None, :]
    bias_KL = reference.decay(distance_KL, slope, hyper, logits_BS.dtype)
    bias_KL = bias_KL.masked_fill(~reference.is_visible(distance_KL, window), -torch.inf)
    text_BS = None if starts is None else texts(starts, num_all)
    means_BTHE: Tensor = _WindowedAttention.apply(
        queries_BTHD, keys, values, bias_KL, logits_BS, text_BS, scale, null_key
    )
    return means_BTHE, last_tokens(keys, values, logits_BS, starts, window) if needs_state else None


def one_token(
    queries_BTHD: Tensor, keys_BTHD: Tensor, values_BTHE: Tensor, *, window: int, scale: float = 1.0,
    slope: float | Tensor = 0.0, hyper: float | Tensor = 0.0, null_key: bool = False, padding: Tensor | None = None,
    state: WindowedAttentionState | None = None, starts: Tensor | None = None, needs_state: bool = True,
) -> tuple[Tensor, WindowedAttentionState | None]:  # fmt: skip
    """For a window of 0 or 1: read the token itself or the token before, with weight 1, or less with a null key."""
    keys, values, logits_BS = all_tokens(queries_BTHD, keys_BTHD, values_BTHE, padding, state)
    new = last_tokens(keys, values, logits_BS, starts, window) if needs_state else None
    first, last = keys.shape[1] - queries_BTHD.shape[1] - window, keys.shape[1] - window
    read = slice(max(first, 0), last)
    keys, values = (pad(x[:, read], (0, 0, 0, 0, max(-first, 0), 0)) for x in (keys, values))
    logits_BT = pad(logits_BS[:, read], (max(-first, 0), 0), value=-torch.inf)
    if window and starts is not None:
        logits_BT = logits_BT.masked_fill(starts, -torch.inf)
    if not null_key:
        return values.masked_fill((logits_BT == -torch.inf)[..., None, None], 0.0), new
    scores_BTH = scale * (queries_BTHD.to(logits_BT.dtype) * keys.to(logits_BT.dtype)).sum(dim=-1)
    scores_BTH = scores_BTH + logits_BT[..., None] + (hyper - slope) * window
    return softmax(scores_BTH[..., None], 0.0) * values, new


def why_wider(most: int, *_: Tensor, window: int, **options: object) -> str | None:
    """Why `one_token` does not take a call, or None; `most` is 1 on a CPU, else 0, as GPU kernels take windows of 1."""
    return None if window <= most else f"the window is larger than {most}"


def from_ring(
    queries_BTHD: Tensor, keys_BTHD: Tensor, values_BTHE: Tensor, ring: Ring, *, window: int, scale: float,
    slope: float | Tensor, hyper: float | Tensor, null_key: bool, padding: Tensor | None,
) -> tuple[Tensor, WindowedAttentionState]:  # fmt: skip
    """The means at a few new tokens, which read a ring; and these tokens. In each row, padding may only come last."""
    dtype, num_new = torch.promote_types(ring.tokens[0].dtype, queries_BTHD.dtype), queries_BTHD.shape[1]
    kept_keys, kept_values, kept_logits = (x.to(dtype) for x in ring.tokens)
    tokens = all_tokens(queries_BTHD, keys_BTHD, values_BTHE, padding, None)
    new = WindowedAttentionState(*(x.to(dtype) for x in tokens))
    null_logit = 0.0 if null_key else None
    queries_BHTD = queries_BTHD.to(dtype).transpose(1, 2) * scale
    scores_BHTS = queries_BHTD @ kept_keys.permute(0, 2, 3, 1) + kept_logits[:, None, None, :]
    has_decay = not (isinstance(slope, float | int) and isinstance(hyper, float | int) and slope == hyper == 0)
    if num_new > 1 or has_decay:
        scores_BHTS = _weigh(scores_BHTS, ring.distances(num_new)[:, None], window, slope, hyper)
    values_BHSE = kept_values.transpose(1, 2)
    if num_new == 1:  # the token does not read itself
        return (softmax(scores_BHTS, null_logit) @ values_BHSE).transpose(1, 2), new
    index_T = torch.arange(num_new, device=keys_BTHD.device)
    scores_BHTT = queries_BHTD @ new.keys_BSHD.permute(0, 2, 3, 1) + new.logits_BS[:, None, None, :]
    scores_BHTT = _weigh(scores_BHTT, index_T[:, None] - index_T, window, slope, hyper)
    weights = softmax(torch.cat([scores_BHTS, scores_BHTT], dim=-1), null_logit)
    means_BHTE = weights[..., :-num_new] @ values_BHSE + weights[..., -num_new:] @ new.values_BSHE.transpose(1, 2)
    return means_BHTE.transpose(1, 2), new


def _weigh(scores: Tensor, distance: Tensor, window: int, slope: float | Tensor, hyper: float | Tensor) -> Tensor:
    scores = scores + reference.decay(distance, slope, hyper, scores.dtype)
    return scores.masked_fill(~reference.is_visible(distance, window), -torch.inf)


class _WindowedAttention(torch.autograd.Function):
    """Means (B, T, H, E) of the values, in the dtype of the bias, which is -inf for pairs outside of windows.

    Only the matrix products for the means and for the gradients of values and keys are in the dtype of the values:
    their results are rounded, but never subtracted from each other.
    """

    @staticmethod
    def forward(
        ctx: Any, queries_BTHD: Tensor, keys_BSHD: Tensor, values_BSHE: Tensor, bias_KL: Tensor, logits_BS: Tensor,
        text_BS: Tensor | None, scale: float, null_key: bool,
    ) -> Tensor:  # fmt: skip
        means_BTHE = values_BSHE.new_empty(*queries_BTHD.shape[:3], values_BSHE.shape[3])
        for tile in _tiles(queries_BTHD.shape, keys_BSHD.shape[1], bias_KL):
            queries = query_blocks(queries_BTHD, tile, bias_KL.dtype)
            keys = key_blocks(keys_BSHD, tile, bias_KL.dtype)
            weights = _weights(queries, keys, _biases(bias_KL, logits_BS, text_BS, tile), scale, null_key)
            weights[..., -1] = 0.0
            values = key_blocks(values_BSHE, tile, values_BSHE.dtype)
            write_query_blocks(torch.bmm(weights.to(values.dtype), values), tile, means_BTHE)
        ctx.save_for_backward(queries_BTHD, keys_BSHD, values_BSHE, bias_KL, logits_BS, text_BS, means_BTHE)
        ctx.options = scale, null_key
        return means_BTHE

    @staticmethod
    def backward(ctx: Any, *dmeans: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("windowed_attention")
        queries_BTHD, keys_BSHD, values_BSHE, bias_KL, logits_BS, text_BS, means_BTHE = ctx.saved_tensors
        scale, null_key = ctx.options
        dtype, narrow = bias_KL.dtype, values_BSHE.dtype
        dqueries_BTHD = torch.empty_like(queries_BTHD)
        dkeys_BSHD = torch.zeros_like(keys_BSHD, dtype=dtype)
        dvalues_BSHE = torch.zeros_like(values_BSHE, dtype=dtype)
        dbias_KL = torch.zeros_like(bias_KL) if ctx.needs_input_grad[3] else None
        with torch.autocast(bias_KL.device.type, enabled=False):
            for tile in _tiles(queries_BTHD.shape, keys_BSHD.shape[1], bias_KL):
                queries, keys = query_blocks(queries_BTHD, tile, dtype), key_blocks(keys_BSHD, tile, dtype)
                means, dmean = (query_blocks(x, tile, dtype) for x in (means_BTHE, dmeans[0]))
                weights = _weights(queries, keys, _biases(bias_KL, logits_BS, text_BS, tile), scale, null_key)
                dweights = torch.bmm(dmean, key_blocks(values_BSHE, tile, dtype).transpose(1, 2))
                dscores = _softmax_backward(weights, dweights, (means * dmean).sum(dim=-1, keepdim=True))
                weights[..., -1] = 0.0
                dvalues = torch.bmm(weights.to(narrow).transpose(1, 2), dmean.to(narrow))
                add_key_blocks(dvalues, tile, dvalues_BSHE)
                write_query_blocks(torch.bmm(dscores, keys).mul_(scale), tile, dqueries_BTHD)
                dkeys = torch.bmm(dscores.to(narrow).transpose(1, 2), queries.to(narrow))
                add_key_blocks(dkeys, tile, dkeys_BSHD)
                if dbias_KL is not None:
                    dbias_KL[: tile.block, _columns(bias_KL, tile)] += dscores.sum(dim=0)
        dkeys_BSHD, dvalues_BSHE = dkeys_BSHD.mul_(scale).to(keys_BSHD.dtype), dvalues_BSHE.to(values_BSHE.dtype)
        return dqueries_BTHD, dkeys_BSHD, dvalues_BSHE, dbias_KL, None, None, None, None


def _columns(bias_KL: Tensor, tile: Tile) -> slice:
    """The columns of the bias for the tile's keys: the tokens of the window, as far as they exist, and the block."""
    last = bias_KL.shape[1] - bias_KL.shape[0] + tile.block
    return slice(last - tile.num_keys, last)


def _biases(bias_KL: Tensor, logits_BS: Tensor, text_BS: Tensor | None, tile: Tile) -> Tensor:
    """The terms added to all heads' scores, (B, N, 1, K, L): decay, and -inf for padding and other texts."""
    logits_BNL = logits_BS[tile.keys].unfold(1, tile.num_keys, tile.block)
    biases_BNKL = bias_KL[: tile.block, _columns(bias_KL, tile)] + logits_BNL[:, :, None, :]
    if text_BS is not None:
        keys_BNL = text_BS[tile.keys].unfold(1, tile.num_keys, tile.block)
        # The last keys of a block are at the positions of its queries.
        biases_BNKL.masked_fill_(keys_BNL[:, :, -tile.block :, None] != keys_BNL[:, :, None, :], -torch.inf)
    return biases_BNKL[:, :, None]


def _weights(queries: Tensor, keys: Tensor, biases: Tensor, scale: float, null_key: bool) -> Tensor:
    """Softmax of the scores; the last column is the extra key."""
    scores = torch.bmm(queries, keys.transpose(1, 2)).mul_(scale)
    by_block = scores.view(*biases.shape[:2], -1, *scores.shape[1:])
    by_block += biases
    scores[..., -1] = 0.0 if null_key else torch.finfo(scores.dtype).min
    return torch.softmax(scores, dim=-1)


def _softmax_backward(weights: Tensor, dweights: Tensor, mean: Tensor) -> Tensor:
    """The gradient p (g - sum p g); `mean` = sum p g is subtracted first, else digits cancel if a weight is near 1.

    The mean has a rounding error; PyTorch's own gradient of the softmax then subtracts the remaining sum.
    """
    dweights[..., -1] = 0.0
    dweights -= mean
    dscores = torch.ops.aten._softmax_backward_data(dweights, weights, -1, weights.dtype)
    dscores[..., -1] = 0.0
    return dscores


def block_size(num_new: int, num_heads: int, window: int, device: torch.device) -> int:
    """The number of queries in a block: about the window; fewer if a block of a wide window would not fit a tile."""
    largest = min(max(LARGEST_BLOCK, window // LARGEST_SHARE), LARGEST_OF_ALL)
    numbers = _num_weights(device) if largest == LARGEST_BLOCK else max(_num_weights(device), MOST_NUMBERS)
    wanted = numbers // (num_heads * max(window, 1)) // SMALLEST_BLOCK * SMALLEST_BLOCK
    return min(num_new, largest, max(min(wanted, window), SMALLEST_BLOCK))


def _tiles(shape: torch.Size, num_all: int, bias_KL: Tensor) -> Iterator[Tile]:
    """Tiles, in the order of time, of queries (B, T, H, D), which are the last of `num_all` tokens."""
    num_batch, num_new, num_heads = shape[:3]
    num_read, block, most = num_all - num_new, len(bias_KL), _num_weights(bias_KL.device)
    window, first = bias_KL.shape[1] - block, 0
    while first < num_new:
        size = min(block, num_new - first)
        cut = max(window - num_read - first, 0)  # keys of the window before the first token
        num_keys = window + size - cut
        num_blocks = 1
        if cut == 0:
            fit = most // (num_heads * size * num_keys)
            num_blocks = max(1, min((num_new - first) // size, fit))
        fit = max(1, most // (num_blocks * num_heads * size * num_keys))
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
    """Write the results for the tile's queries to the places that `query_blocks` reads."""
    num_heads = total_BTHD.shape[2]
    blocks_BNHKD = blocks.unflatten(0, (-1, tile.num_blocks, num_heads))
    total_BTHD[tile.queries].unflatten(1, (tile.num_blocks, tile.block)).copy_(blocks_BNHKD.transpose(2, 3))


def add_key_blocks(blocks: Tensor, tile: Tile, total_BSHD: Tensor) -> None:
    """Add gradients of the tile's keys at the places that `key_blocks` reads; blocks share keys."""
    blocks_BNHLD = blocks.unflatten(0, (-1, tile.num_blocks, total_BSHD.shape[2]))
    region_BSHD = total_BSHD[tile.keys]
    if tile.num_blocks == 1:
        region_BSHD.add_(blocks_BNHLD[:, 0].transpose(1, 2))
        return
    for offset in range(0, tile.num_keys, tile.block):
        # Pieces no longer than a block do not overlap, so that each target is written once.
        piece_BNHLD = blocks_BNHLD[:, :, :, offset : offset + tile.block]
        width = piece_BNHLD.shape[3]
        last = offset + (tile.num_blocks - 1) * tile.block + width
        targets_BNHDL = region_BSHD[:, offset:last].unfold(1, width, tile.block)
        targets_BNHDL.add_(piece_BNHLD.transpose(3, 4))
