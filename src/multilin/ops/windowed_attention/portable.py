"""Windowed attention in linear time from PyTorch operations: tiles of queries against the keys their windows hold.

A tile's weights are made, used and dropped while they are in the cache, and made again backward. The last key of a
block is in no window of the strict past, so its column serves as a sink: of logit 0 it is the null key, of the lowest
finite logit it takes the weight of a row that sees nothing; its value is 0 either way, and the softmax needs no cases.
"""

from typing import Any

import torch
from torch import Tensor

from multilin.ops.windowed_attention import reference
from multilin.ops.windowed_attention.tiles import (
    Tile,
    add_key_blocks,
    block_size,
    key_blocks,
    query_blocks,
    tiles,
    write_query_blocks,
)
from multilin.ops.windowed_attention.tokens import WindowedAttentionState, all_tokens, last_tokens, texts

SHORT = 8  # tokens up to which the definition itself is faster


def why_not_short(queries: Tensor, *_: Tensor, **options: object) -> str | None:
    """The reason against the definition."""
    return None if queries.shape[1] <= SHORT else "there are many tokens"


def windowed_attention(
    queries_BTHD: Tensor, keys_BTHD: Tensor, values_BTHE: Tensor, *, window: int, scale: float = 1.0,
    slope: float | Tensor = 0.0, hyper: float | Tensor = 0.0, null_key: bool = False, padding: Tensor | None = None,
    state: WindowedAttentionState | None = None, starts: Tensor | None = None, needs_state: bool = True,
) -> tuple[Tensor, WindowedAttentionState | None]:  # fmt: skip
    """See `multilin.ops.windowed_attention`; for windows of 1 and more."""
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


class _WindowedAttention(torch.autograd.Function):
    """Means (B, T, H, E) of the values; works in the dtype of the bias, which also hides what no window holds.

    Products whose results are rounded only, never subtracted from each other, are made of weights and gradients of
    scores in the dtype of the values: the means, and the gradients of values and keys.
    """

    @staticmethod
    def forward(
        ctx: Any, queries_BTHD: Tensor, keys_BSHD: Tensor, values_BSHE: Tensor, bias_KL: Tensor, logits_BS: Tensor,
        text_BS: Tensor | None, scale: float, null_key: bool,
    ) -> Tensor:  # fmt: skip
        means_BTHE = values_BSHE.new_empty(*queries_BTHD.shape[:3], values_BSHE.shape[3])
        for tile in _tiles(queries_BTHD, keys_BSHD, bias_KL):
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
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *dmeans: Tensor) -> tuple[Tensor | None, ...]:
        queries_BTHD, keys_BSHD, values_BSHE, bias_KL, logits_BS, text_BS, means_BTHE = ctx.saved_tensors
        scale, null_key = ctx.options
        dtype, narrow = bias_KL.dtype, values_BSHE.dtype
        dqueries_BTHD = torch.empty_like(queries_BTHD)
        dkeys_BSHD = torch.zeros_like(keys_BSHD, dtype=dtype)
        dvalues_BSHE = torch.zeros_like(values_BSHE, dtype=dtype)
        dbias_KL = torch.zeros_like(bias_KL) if ctx.needs_input_grad[3] else None
        with torch.autocast(bias_KL.device.type, enabled=False):
            for tile in _tiles(queries_BTHD, keys_BSHD, bias_KL):
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


def _tiles(queries_BTHD: Tensor, keys_BSHD: Tensor, bias_KL: Tensor) -> Any:
    num_read = keys_BSHD.shape[1] - queries_BTHD.shape[1]
    block, num_columns = bias_KL.shape
    return tiles(queries_BTHD.shape, num_read, num_columns - block, block, bias_KL.device)


def _columns(bias_KL: Tensor, tile: Tile) -> slice:
    """The columns of the bias that belong to the tile's keys: its window, as far as there are tokens, and its block."""
    last = bias_KL.shape[1] - bias_KL.shape[0] + tile.block
    return slice(last - tile.num_keys, last)


def _biases(bias_KL: Tensor, logits_BS: Tensor, text_BS: Tensor | None, tile: Tile) -> Tensor:
    """What is added to all heads' products: decay, padding and other texts, (B, N, 1, K, L)."""
    logits_BNL = logits_BS[tile.keys].unfold(1, tile.num_keys, tile.block)
    biases_BNKL = bias_KL[: tile.block, _columns(bias_KL, tile)] + logits_BNL[:, :, None, :]
    if text_BS is not None:
        keys_BNL = text_BS[tile.keys].unfold(1, tile.num_keys, tile.block)
        # The last keys of a block are those at its queries.
        biases_BNKL.masked_fill_(keys_BNL[:, :, -tile.block :, None] != keys_BNL[:, :, None, :], -torch.inf)
    return biases_BNKL[:, :, None]


def _weights(queries: Tensor, keys: Tensor, biases: Tensor, scale: float, null_key: bool) -> Tensor:
    """Softmax of the scores with the sink in the last column."""
    scores = torch.bmm(queries, keys.transpose(1, 2)).mul_(scale)
    by_block = scores.view(*biases.shape[:2], -1, *scores.shape[1:])
    by_block += biases
    scores[..., -1] = 0.0 if null_key else torch.finfo(scores.dtype).min
    return torch.softmax(scores, dim=-1)


def _softmax_backward(weights: Tensor, dweights: Tensor, mean: Tensor) -> Tensor:
    """p (g - sum p g), with g counted from its mean so that nothing cancels where one weight is nearly 1.

    The mean itself is known only to the rounding of g; the softmax's own gradient takes away what is left of it.
    """
    dweights[..., -1] = 0.0
    dweights -= mean
    dscores = torch.ops.aten._softmax_backward_data(dweights, weights, -1, weights.dtype)
    dscores[..., -1] = 0.0
    return dscores
