"""Triton kernels of windowed attention: tiles of queries against the tiles of keys that their windows touch.

Positions count all S tokens, the state's tokens first; the last T tokens are new. All tensors are contiguous.
Every kernel computes scores and gradients of weights by the same steps, from tiles of the same sizes. So all kernels
get the same bits, on which the gradient of the softmax relies.
"""

import triton
import triton.language as tl

from multilin.ops.kernels.gpu_launch import autotuned
from multilin.ops.kernels.gpu_tiles import dot, finite, inverse, load_tile, narrow, store_tile

WAYS: list[tuple[dict[str, int], int, int]] = [({}, 4, 2), ({}, 4, 1)]
KIND = ("D", "E", "BQ", "is_wide", "DECAY")


@triton.jit
def first_of(p_x, length, H, WIDTH: tl.constexpr):
    """The address of this program's text and head in a (B, length, H, WIDTH) tensor."""
    i_row, i_head = tl.program_id(0) // H, tl.program_id(0) % H
    return p_x + (i_row.to(tl.int64) * length * H + i_head) * WIDTH


@triton.jit
def load_vectors(p_x, i_times, length, H, WIDTH: tl.constexpr, BW: tl.constexpr):
    """Load the vectors (times, WIDTH) of this program's head; 0 outside of the tensor."""
    i_columns = tl.arange(0, BW)
    return load_tile(
        first_of(p_x, length, H, WIDTH), i_times, i_times < length, H * WIDTH, i_columns, i_columns < WIDTH
    )


@triton.jit
def store_vectors(p_x, x, i_times, length, H, WIDTH: tl.constexpr, BW: tl.constexpr):
    """Store vectors at the places from which `load_vectors` loads."""
    i_columns = tl.arange(0, BW)
    p_first = first_of(p_x, length, H, WIDTH)
    store_tile(p_first, i_times, i_times < length, H * WIDTH, i_columns, i_columns < WIDTH, x)


@triton.jit
def load_decays(call):
    """Slope and hyper, from the tensor of decays if there is one, else from the numbers."""
    slope, hyper = call.slope, call.hyper
    if call.decays is not None:
        slope, hyper = tl.load(call.decays), tl.load(call.decays + 1)
    return slope, hyper


@triton.jit
def scores(b_queries, b_keys, i_query, i_key, call, decays, BQ: tl.constexpr, BL: tl.constexpr, DECAY: tl.constexpr):
    """Scores of the tile that begins at these positions, -inf for hidden keys; and the distances, at least 1."""
    i_queries, i_keys = i_query + tl.arange(0, BQ), i_key + tl.arange(0, BL)
    distance = i_queries[:, None] - i_keys[None, :]
    away = tl.maximum(distance, 1).to(tl.float32)
    S, i_row = call.num_all, tl.program_id(0) // call.num_heads
    logits = tl.load(call.logits + i_row * S + i_keys, mask=i_keys < S, other=0.0)
    b_scores = dot(b_queries, tl.trans(b_keys)) * call.scale + logits[None, :]
    if DECAY > 0:
        b_scores -= decays[0] * away
    if DECAY > 1:
        b_scores += decays[1] / away
    is_whole = (i_query - i_key >= BL) & (i_query + BQ - 1 - i_key <= call.window) & (i_key + BL <= S)
    if DECAY > 0 or call.texts is not None or not is_whole:  # with decays, skipping this gains nothing
        visible = (distance >= 1) & (distance <= call.window) & (i_keys < S)[None, :]
        if call.texts is not None:
            text_of_queries = tl.load(call.texts + i_row * S + i_queries, mask=i_queries < S, other=-1)
            text_of_keys = tl.load(call.texts + i_row * S + i_keys, mask=i_keys < S, other=-2)
            visible = visible & (text_of_queries[:, None] == text_of_keys[None, :])
        b_scores = tl.where(visible, b_scores, float("-inf"))
    return b_scores, away


@triton.jit
def load_kept(p_top, p_total, i_rows, m_rows):
    """The largest score of each query, and 1 / the sum of exp(score - largest)."""
    top = tl.load(p_top + i_rows, mask=m_rows, other=0.0)
    return top, inverse(tl.load(p_total + i_rows, mask=m_rows, other=0.0))


@triton.jit
def weights_again(
    b_queries, b_keys, b_values, b_dmeans, kept, i_query, i_key, call, decays,
    BQ: tl.constexpr, BL: tl.constexpr, DECAY: tl.constexpr,
):  # fmt: skip
    """A tile's weights, computed again; their gradients minus the origin; distances. `kept` is (top, share, origin)."""
    b_scores, away = scores(b_queries, b_keys, i_query, i_key, call, decays, BQ, BL, DECAY)
    b_weights = tl.exp(b_scores - kept[0][:, None]) * kept[1][:, None]
    return b_weights, dot(b_dmeans, tl.trans(b_values)) - kept[2][:, None], away


@autotuned(WAYS, KIND)
@triton.jit
def forward(
    p_queries, p_keys, p_values, call, p_means, p_top, p_total,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BQ: tl.constexpr, BL: tl.constexpr,
    is_wide: tl.constexpr, DECAY: tl.constexpr, NULL_KEY: tl.constexpr,
):  # fmt: skip
    """Compute the means of a tile of queries, and each query's largest score `top` and `total` of exp(score - top)."""
    T, S, H, window, decays = call.num_new, call.num_all, call.num_heads, call.window, load_decays(call)
    i_first = tl.program_id(1) * BQ
    i_times = i_first + tl.arange(0, BQ)
    b_queries = load_vectors(p_queries, i_times, T, H, D, BD)
    top = tl.full((BQ,), 0.0 if NULL_KEY else float("-inf"), tl.float32)
    total = tl.full((BQ,), 1.0 if NULL_KEY else 0.0, tl.float32)
    b_means = tl.zeros((BQ, BE), tl.float32)
    for i_key in range(tl.maximum(i_first + S - T - window, 0) // BL * BL, tl.minimum(i_first + S - T + BQ, S), BL):
        i_keys = i_key + tl.arange(0, BL)
        b_keys, b_values = load_vectors(p_keys, i_keys, S, H, D, BD), load_vectors(p_values, i_keys, S, H, E, BE)
        b_scores, _ = scores(b_queries, b_keys, i_first + S - T, i_key, call, decays, BQ, BL, DECAY)
        new_top = tl.maximum(top, tl.max(b_scores, axis=1))
        b_weights = tl.exp(b_scores - finite(new_top)[:, None])
        shrink = tl.exp(top - finite(new_top))
        total = total * shrink + tl.sum(b_weights, axis=1)
        b_means = b_means * shrink[:, None] + dot(narrow(b_weights, b_values.dtype), b_values)
        top = new_top
    b_means = b_means / tl.where(total > 0.0, total, 1.0)[:, None]
    store_vectors(p_means, b_means, i_times, T, H, E, BE)
    i_rows = tl.program_id(0).to(tl.int64) * T + i_times
    tl.store(p_top + i_rows, finite(top), mask=i_times < T)
    tl.store(p_total + i_rows, total, mask=i_times < T)


@autotuned(WAYS, KIND)
@triton.jit
def backward_queries(
    p_queries, p_keys, p_values, call, p_top, p_total, p_dmeans, p_origin, p_rest, p_means, p_dqueries, p_ddecays,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BQ: tl.constexpr, BL: tl.constexpr,
    is_wide: tl.constexpr, DECAY: tl.constexpr, NULL_KEY: tl.constexpr,
):  # fmt: skip
    """Compute gradients of a tile of queries; per query, the origin dmeans . means and the sum of p (g - origin)."""
    T, S, H, window, decays = call.num_new, call.num_all, call.num_heads, call.window, load_decays(call)
    i_first = tl.program_id(1) * BQ
    i_times = i_first + tl.arange(0, BQ)
    i_rows = tl.program_id(0).to(tl.int64) * T + i_times
    b_queries, b_dmeans = load_vectors(p_queries, i_times, T, H, D, BD), load_vectors(p_dmeans, i_times, T, H, E, BE)
    b_means = load_vectors(p_means, i_times, T, H, E, BE)
    top, share = load_kept(p_top, p_total, i_rows, i_times < T)
    origin = tl.sum(b_dmeans.to(tl.float32) * b_means.to(tl.float32), axis=1)
    rest = tl.zeros((BQ,), tl.float32)
    if NULL_KEY:
        rest = -tl.exp(-top) * share * origin
    kept = top, share, origin
    low, high = tl.maximum(i_first + S - T - window, 0) // BL * BL, tl.minimum(i_first + S - T + BQ, S)
    for i_key in range(low, high, BL):
        i_keys = i_key + tl.arange(0, BL)
        b_keys, b_values = load_vectors(p_keys, i_keys, S, H, D, BD), load_vectors(p_values, i_keys, S, H, E, BE)
        b_weights, b_dweights, _ = weights_again(
            b_queries, b_keys, b_values, b_dmeans, kept, i_first + S - T, i_key, call, decays, BQ, BL, DECAY
        )
        rest += tl.sum(b_weights * b_dweights, axis=1)
    b_dqueries = tl.zeros((BQ, BD), tl.float32)
    dslope, dhyper = tl.zeros((BQ,), tl.float32), tl.zeros((BQ,), tl.float32)
    for i_key in range(low, high, BL):
        i_keys = i_key + tl.arange(0, BL)
        b_keys, b_values = load_vectors(p_keys, i_keys, S, H, D, BD), load_vectors(p_values, i_keys, S, H, E, BE)
        b_weights, b_dweights, away = weights_again(
            b_queries, b_keys, b_values, b_dmeans, kept, i_first + S - T, i_key, call, decays, BQ, BL, DECAY
        )
        b_dscores = b_weights * (b_dweights - rest[:, None])
        b_dqueries += dot(narrow(b_dscores, b_keys.dtype), b_keys)
        if p_ddecays is not None:
            dslope -= tl.sum(b_dscores * away, axis=1)
            dhyper += tl.sum(b_dscores / away, axis=1)
    store_vectors(p_dqueries, b_dqueries * call.scale, i_times, T, H, D, BD)
    tl.store(p_origin + i_rows, origin, mask=i_times < T)
    tl.store(p_rest + i_rows, rest, mask=i_times < T)
    if p_ddecays is not None:
        p_ddecays += (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * 2
        tl.store(p_ddecays, tl.sum(dslope, axis=0))
        tl.store(p_ddecays + 1, tl.sum(dhyper, axis=0))


@autotuned(WAYS, KIND)
@triton.jit
def backward_keys(
    p_queries, p_keys, p_values, call, p_top, p_total, p_dmeans, p_origin, p_rest, p_dkeys, p_dvalues,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BQ: tl.constexpr, BL: tl.constexpr,
    is_wide: tl.constexpr, DECAY: tl.constexpr,
):  # fmt: skip
    """Compute gradients of a tile of keys and values, from the tiles of queries that read it."""
    T, S, H, window, decays = call.num_new, call.num_all, call.num_heads, call.window, load_decays(call)
    i_key = tl.program_id(1) * BL
    i_keys = i_key + tl.arange(0, BL)
    b_keys, b_values = load_vectors(p_keys, i_keys, S, H, D, BD), load_vectors(p_values, i_keys, S, H, E, BE)
    b_dkeys, b_dvalues = tl.zeros((BL, BD), tl.float32), tl.zeros((BL, BE), tl.float32)
    low, high = tl.maximum(i_key + 1 - (S - T), 0) // BQ * BQ, tl.minimum(i_key + BL + window - (S - T), T)
    for i_first in range(low, high, BQ):
        i_times = i_first + tl.arange(0, BQ)
        i_rows, m_times = tl.program_id(0).to(tl.int64) * T + i_times, i_times < T
        b_queries = load_vectors(p_queries, i_times, T, H, D, BD)
        b_dmeans = load_vectors(p_dmeans, i_times, T, H, E, BE)
        top, share = load_kept(p_top, p_total, i_rows, m_times)
        kept = top, share, tl.load(p_origin + i_rows, mask=m_times, other=0.0)
        b_weights, b_dweights, _ = weights_again(
            b_queries, b_keys, b_values, b_dmeans, kept, i_first + S - T, i_key, call, decays, BQ, BL, DECAY
        )
        b_dscores = b_weights * (b_dweights - tl.load(p_rest + i_rows, mask=m_times, other=0.0)[:, None])
        b_dvalues += dot(tl.trans(narrow(b_weights, b_values.dtype)), b_dmeans)
        b_dkeys += dot(tl.trans(narrow(b_dscores, b_keys.dtype)), b_queries)
    store_vectors(p_dkeys, b_dkeys * call.scale, i_keys, S, H, D, BD)
    store_vectors(p_dvalues, b_dvalues, i_keys, S, H, E, BE)


@triton.jit
def step(
    p_query, p_key, p_value, p_logit, p_keys, p_values, p_starts, call, p_mean, p_new_keys, p_new_values, p_new_logits,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BL: tl.constexpr, NULL_KEY: tl.constexpr,
):  # fmt: skip
    """One new token of one head: read the S tokens of the state once, and write them one place nearer to the front."""
    S, H = call.num_all, call.num_heads
    slope, hyper = load_decays(call)
    i_row, i_head = tl.program_id(0) // H, tl.program_id(0) % H
    hidden = 0.0
    if p_starts is not None:
        hidden = tl.where(tl.load(p_starts + i_row) != 0, float("-inf"), 0.0)
    i_new = tl.arange(0, 1)
    b_query = load_vectors(p_query, i_new, 1, H, D, BD).to(tl.float32)
    top = tl.full((), 0.0 if NULL_KEY else float("-inf"), tl.float32)
    total = tl.full((), 1.0 if NULL_KEY else 0.0, tl.float32)
    b_mean = tl.zeros((BE,), tl.float32)
    for i_key in range(0, S, BL):
        i_keys = i_key + tl.arange(0, BL)
        b_keys, b_values = load_vectors(p_keys, i_keys, S, H, D, BD), load_vectors(p_values, i_keys, S, H, E, BE)
        logits = tl.load(call.logits + i_row * S + i_keys, mask=i_keys < S, other=float("-inf")) + hidden
        away = tl.maximum(S - i_keys, 1).to(tl.float32)
        b_scores = tl.sum(b_keys * b_query, axis=1) * call.scale
        b_scores += (hyper / away - slope * away) + logits
        new_top = tl.maximum(top, tl.max(b_scores, axis=0))
        b_weights = tl.exp(b_scores - finite(new_top))
        shrink = tl.exp(top - finite(new_top))
        total = total * shrink + tl.sum(b_weights, axis=0)
        b_mean = b_mean * shrink + tl.sum(b_weights[:, None] * b_values, axis=0)
        top = new_top
        i_places = tl.where((i_keys == 0) | (i_keys >= S), S, i_keys - 1)  # the first token is forgotten
        store_vectors(p_new_keys, b_keys, i_places, S, H, D, BD)
        store_vectors(p_new_values, b_values, i_places, S, H, E, BE)
        if i_head == 0:
            tl.store(p_new_logits + i_row * S + i_places, logits, mask=i_places < S)
    store_vectors(p_mean, (b_mean / tl.where(total > 0.0, total, 1.0))[None, :], i_new, 1, H, E, BE)
    store_vectors(p_new_keys, load_vectors(p_key, i_new, 1, H, D, BD), i_new + S - 1, S, H, D, BD)
    store_vectors(p_new_values, load_vectors(p_value, i_new, 1, H, E, BE), i_new + S - 1, S, H, E, BE)
    if i_head == 0:
        tl.store(p_new_logits + i_row * S + S - 1, tl.load(p_logit + i_row))
