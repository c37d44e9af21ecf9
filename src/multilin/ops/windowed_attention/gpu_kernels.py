"""Triton kernels of windowed attention: tiles of queries against the tiles of keys that their windows touch.

Positions are those among all S tokens, the state's first; the new tokens are the last T. `scores` and the gradient of
the weights are made by the same steps from tiles of the same sizes in every kernel, so that they come out bit for bit
the same, which the gradient of the softmax relies on.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

from multilin.ops.kernels.gpu_launch import autotuned
from multilin.ops.kernels.gpu_rounding import narrow
from multilin.ops.kernels.gpu_tiles import dot

WAYS: list[tuple[dict[str, int], int, int]] = [({}, 4, 2), ({}, 4, 3), ({}, 8, 2), ({}, 4, 1)]
KIND = ("D", "E", "BQ", "is_wide")


@triton.jit
def place(p_x, i_row, i_head, stride_b, stride_h):
    """The first number of one head of one text."""
    return p_x + i_row.to(tl.int64) * stride_b + i_head * stride_h


@triton.jit
def load_tile(p_x, i_times, num_times, stride_t, WIDTH: tl.constexpr, BW: tl.constexpr):
    """(times, WIDTH), 0 outside."""
    i_columns = tl.arange(0, BW)
    mask = (i_times < num_times)[:, None] & (i_columns < WIDTH)[None, :]
    return tl.load(p_x + i_times.to(tl.int64)[:, None] * stride_t + i_columns[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(p_x, x, i_times, num_times, stride_t, WIDTH: tl.constexpr, BW: tl.constexpr):
    """Write what `load_tile` reads."""
    i_columns = tl.arange(0, BW)
    mask = (i_times < num_times)[:, None] & (i_columns < WIDTH)[None, :]
    places = i_times.to(tl.int64)[:, None] * stride_t + i_columns[None, :]
    tl.store(p_x + places, narrow(x, p_x.dtype.element_ty), mask=mask)


@triton.jit
def load_decays(p_decays, slope, hyper):
    """Slope and hyperbolic decay: the numbers given, or those of a tensor."""
    if p_decays is not None:
        slope, hyper = tl.load(p_decays), tl.load(p_decays + 1)
    return slope, hyper


@triton.jit
def scores(b_queries, b_keys, p_logits, p_texts, i_queries, i_keys, num_keys, window, scale, slope, hyper):
    """Logits of a tile, -inf where a key is not visible, and distances of 1 at least."""
    distance = i_queries[:, None] - i_keys[None, :]
    away = tl.maximum(distance, 1).to(tl.float32)
    visible = (distance >= 1) & (distance <= window) & (i_keys < num_keys)[None, :]
    if p_texts is not None:
        text_of_queries = tl.load(p_texts + i_queries, mask=i_queries < num_keys, other=-1)
        text_of_keys = tl.load(p_texts + i_keys, mask=i_keys < num_keys, other=-2)
        visible = visible & (text_of_queries[:, None] == text_of_keys[None, :])
    logits = tl.load(p_logits + i_keys, mask=i_keys < num_keys, other=0.0)
    b_scores = dot(b_queries, tl.trans(b_keys)) * scale + (hyper / away - slope * away) + logits[None, :]
    return tl.where(visible, b_scores, float("-inf")), away


@triton.jit
def finite(top):
    """A running maximum from which numbers can be subtracted: 0 while there is none."""
    return tl.where(top == float("-inf"), 0.0, top)


@autotuned(WAYS, KIND)
@triton.jit
def forward(
    p_queries, p_keys, p_values, p_logits, p_texts, p_decays, p_means, p_top, p_total,
    T, S, H, window, scale, slope, hyper, query_b, query_t, query_h, key_b, key_t, key_h, value_b, value_t, value_h,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BQ: tl.constexpr, BL: tl.constexpr,
    NULL_KEY: tl.constexpr, is_wide: tl.constexpr,
):  # fmt: skip
    """Means of a tile of queries, with a running maximum `top` and the sum `total` of exp(score - top)."""
    i_row, i_head = tl.program_id(0) // H, tl.program_id(0) % H
    i_first = tl.program_id(1) * BQ
    i_times = i_first + tl.arange(0, BQ)
    i_queries = i_times + S - T
    slope, hyper = load_decays(p_decays, slope, hyper)
    p_keys, p_values = place(p_keys, i_row, i_head, key_b, key_h), place(p_values, i_row, i_head, value_b, value_h)
    p_logits += i_row * S
    if p_texts is not None:
        p_texts += i_row * S
    b_queries = load_tile(place(p_queries, i_row, i_head, query_b, query_h), i_times, T, query_t, D, BD)
    top = tl.full((BQ,), 0.0 if NULL_KEY else float("-inf"), tl.float32)
    total = tl.full((BQ,), 1.0 if NULL_KEY else 0.0, tl.float32)
    b_means = tl.zeros((BQ, BE), tl.float32)
    for i_key in range(tl.maximum(i_first + S - T - window, 0) // BL * BL, tl.minimum(i_first + S - T + BQ, S), BL):
        i_keys = i_key + tl.arange(0, BL)
        b_keys = load_tile(p_keys, i_keys, S, key_t, D, BD)
        b_scores, _ = scores(
            b_queries, b_keys, p_logits, p_texts, i_queries, i_keys, S, window, scale, slope, hyper
        )  # fmt: skip
        new_top = tl.maximum(top, tl.max(b_scores, axis=1))
        b_weights = tl.exp(b_scores - finite(new_top)[:, None])
        shrink = tl.exp(top - finite(new_top))
        b_values = load_tile(p_values, i_keys, S, value_t, E, BE)
        total = total * shrink + tl.sum(b_weights, axis=1)
        b_means = b_means * shrink[:, None] + dot(narrow(b_weights, b_values.dtype), b_values)
        top = new_top
    b_means = b_means / tl.where(total > 0.0, total, 1.0)[:, None]
    store_tile(p_means + (i_row.to(tl.int64) * T * H + i_head) * E, b_means, i_times, T, H * E, E, BE)
    place_of_rows = tl.program_id(0).to(tl.int64) * T + i_times
    tl.store(p_top + place_of_rows, finite(top), mask=i_times < T)
    tl.store(p_total + place_of_rows, total, mask=i_times < T)


@triton.jit
def load_rows(p_top, p_total, i_row_of_heads, i_times, T):
    """The maximum and the inverse of the sum, 0 for a query that sees nothing."""
    places = i_row_of_heads.to(tl.int64) * T + i_times
    total = tl.load(p_total + places, mask=i_times < T, other=0.0)
    inverse = tl.where(total > 0.0, 1.0 / tl.where(total > 0.0, total, 1.0), 0.0)
    return tl.load(p_top + places, mask=i_times < T, other=0.0), inverse


@autotuned(WAYS, KIND)
@triton.jit
def backward_queries(
    p_queries, p_keys, p_values, p_logits, p_texts, p_decays, p_means, p_top, p_total, p_dmeans,
    p_dqueries, p_origin, p_rest, p_ddecays,
    T, S, H, window, scale, slope, hyper, query_b, query_t, query_h, key_b, key_t, key_h, value_b, value_t, value_h,
    dmean_b, dmean_t, dmean_h,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BQ: tl.constexpr, BL: tl.constexpr,
    NULL_KEY: tl.constexpr, is_wide: tl.constexpr,
):  # fmt: skip
    """dqueries of a tile; per query the origin dmeans . means, and what the softmax still takes from g - origin."""
    i_row, i_head = tl.program_id(0) // H, tl.program_id(0) % H
    i_first = tl.program_id(1) * BQ
    i_times = i_first + tl.arange(0, BQ)
    i_queries = i_times + S - T
    slope, hyper = load_decays(p_decays, slope, hyper)
    p_keys, p_values = place(p_keys, i_row, i_head, key_b, key_h), place(p_values, i_row, i_head, value_b, value_h)
    p_logits += i_row * S
    if p_texts is not None:
        p_texts += i_row * S
    b_queries = load_tile(place(p_queries, i_row, i_head, query_b, query_h), i_times, T, query_t, D, BD)
    b_dmeans = load_tile(place(p_dmeans, i_row, i_head, dmean_b, dmean_h), i_times, T, dmean_t, E, BE)
    b_means = load_tile(p_means + (i_row.to(tl.int64) * T * H + i_head) * E, i_times, T, H * E, E, BE)
    top, inverse = load_rows(p_top, p_total, tl.program_id(0), i_times, T)
    origin = tl.sum(b_dmeans.to(tl.float32) * b_means.to(tl.float32), axis=1)
    rest = tl.zeros((BQ,), tl.float32)
    if NULL_KEY:
        rest = -tl.exp(-top) * inverse * origin
    low, high = tl.maximum(i_first + S - T - window, 0) // BL * BL, tl.minimum(i_first + S - T + BQ, S)
    for i_key in range(low, high, BL):
        i_keys = i_key + tl.arange(0, BL)
        b_keys, b_values = load_tile(p_keys, i_keys, S, key_t, D, BD), load_tile(p_values, i_keys, S, value_t, E, BE)
        b_scores, _ = scores(b_queries, b_keys, p_logits, p_texts, i_queries, i_keys, S, window, scale, slope, hyper)
        b_weights = tl.exp(b_scores - top[:, None]) * inverse[:, None]
        rest += tl.sum(b_weights * (dot(b_dmeans, tl.trans(b_values)) - origin[:, None]), axis=1)
    b_dqueries = tl.zeros((BQ, BD), tl.float32)
    dslope, dhyper = tl.zeros((BQ,), tl.float32), tl.zeros((BQ,), tl.float32)
    for i_key in range(low, high, BL):
        i_keys = i_key + tl.arange(0, BL)
        b_keys, b_values = load_tile(p_keys, i_keys, S, key_t, D, BD), load_tile(p_values, i_keys, S, value_t, E, BE)
        b_scores, away = scores(
            b_queries, b_keys, p_logits, p_texts, i_queries, i_keys, S, window, scale, slope, hyper
        )  # fmt: skip
        b_weights = tl.exp(b_scores - top[:, None]) * inverse[:, None]
        b_dscores = b_weights * ((dot(b_dmeans, tl.trans(b_values)) - origin[:, None]) - rest[:, None])
        b_dqueries += dot(narrow(b_dscores, b_keys.dtype), b_keys)
        if p_ddecays is not None:
            dslope -= tl.sum(b_dscores * away, axis=1)
            dhyper += tl.sum(b_dscores / away, axis=1)
    store_tile(p_dqueries + (i_row.to(tl.int64) * T * H + i_head) * D, b_dqueries * scale, i_times, T, H * D, D, BD)
    place_of_rows = tl.program_id(0).to(tl.int64) * T + i_times
    tl.store(p_origin + place_of_rows, origin, mask=i_times < T)
    tl.store(p_rest + place_of_rows, rest, mask=i_times < T)
    if p_ddecays is not None:
        p_ddecays += (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * 2
        tl.store(p_ddecays, tl.sum(dslope, axis=0))
        tl.store(p_ddecays + 1, tl.sum(dhyper, axis=0))


@autotuned(WAYS, KIND)
@triton.jit
def backward_keys(
    p_queries, p_keys, p_values, p_logits, p_texts, p_decays, p_top, p_total, p_dmeans, p_origin, p_rest,
    p_dkeys, p_dvalues,
    T, S, H, window, scale, slope, hyper, query_b, query_t, query_h, key_b, key_t, key_h, value_b, value_t, value_h,
    dmean_b, dmean_t, dmean_h,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BQ: tl.constexpr, BL: tl.constexpr,
    is_wide: tl.constexpr,
):  # fmt: skip
    """dkeys and dvalues of a tile of keys, from the tiles of queries that see it."""
    i_row, i_head = tl.program_id(0) // H, tl.program_id(0) % H
    i_key = tl.program_id(1) * BL
    i_keys = i_key + tl.arange(0, BL)
    slope, hyper = load_decays(p_decays, slope, hyper)
    p_queries = place(p_queries, i_row, i_head, query_b, query_h)
    p_dmeans = place(p_dmeans, i_row, i_head, dmean_b, dmean_h)
    p_logits += i_row * S
    if p_texts is not None:
        p_texts += i_row * S
    b_keys = load_tile(place(p_keys, i_row, i_head, key_b, key_h), i_keys, S, key_t, D, BD)
    b_values = load_tile(place(p_values, i_row, i_head, value_b, value_h), i_keys, S, value_t, E, BE)
    b_dkeys, b_dvalues = tl.zeros((BL, BD), tl.float32), tl.zeros((BL, BE), tl.float32)
    low, high = tl.maximum(i_key + 1 - (S - T), 0) // BQ * BQ, tl.minimum(i_key + BL + window - (S - T), T)
    for i_first in range(low, high, BQ):
        i_times = i_first + tl.arange(0, BQ)
        b_queries = load_tile(p_queries, i_times, T, query_t, D, BD)
        b_dmeans = load_tile(p_dmeans, i_times, T, dmean_t, E, BE)
        top, inverse = load_rows(p_top, p_total, tl.program_id(0), i_times, T)
        place_of_rows = tl.program_id(0).to(tl.int64) * T + i_times
        origin = tl.load(p_origin + place_of_rows, mask=i_times < T, other=0.0)
        rest = tl.load(p_rest + place_of_rows, mask=i_times < T, other=0.0)
        b_scores, _ = scores(
            b_queries, b_keys, p_logits, p_texts, i_times + S - T, i_keys, S, window, scale, slope, hyper
        )  # fmt: skip
        b_weights = tl.exp(b_scores - top[:, None]) * inverse[:, None]
        b_dscores = b_weights * ((dot(b_dmeans, tl.trans(b_values)) - origin[:, None]) - rest[:, None])
        b_dvalues += dot(tl.trans(narrow(b_weights, b_values.dtype)), b_dmeans)
        b_dkeys += dot(tl.trans(narrow(b_dscores, b_keys.dtype)), b_queries)
    store_tile(p_dkeys + (i_row.to(tl.int64) * S * H + i_head) * D, b_dkeys * scale, i_keys, S, H * D, D, BD)
    store_tile(p_dvalues + (i_row.to(tl.int64) * S * H + i_head) * E, b_dvalues, i_keys, S, H * E, E, BE)


@triton.jit
def step(
    p_query, p_key, p_value, p_logit, p_keys, p_values, p_logits, p_starts, p_decays,
    p_mean, p_new_keys, p_new_values, p_new_logits, S, H, scale, slope, hyper,
    query_b, query_h, key_b, key_h, value_b, value_h,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BL: tl.constexpr,
    NULL_KEY: tl.constexpr, NEEDS_STATE: tl.constexpr,
):  # fmt: skip
    """One new token of one head: reads the S tokens of the state once, and writes them one place further down."""
    i_row, i_head = tl.program_id(0) // H, tl.program_id(0) % H
    slope, hyper = load_decays(p_decays, slope, hyper)
    hidden = 0.0
    if p_starts is not None:
        hidden = tl.where(tl.load(p_starts + i_row) != 0, float("-inf"), 0.0)
    i_columns, i_others = tl.arange(0, BD), tl.arange(0, BE)
    first_key, first_value = (i_row.to(tl.int64) * S * H + i_head) * D, (i_row.to(tl.int64) * S * H + i_head) * E
    b_query = tl.load(place(p_query, i_row, i_head, query_b, query_h) + i_columns, mask=i_columns < D, other=0.0)
    top = tl.full((), 0.0 if NULL_KEY else float("-inf"), tl.float32)
    total = tl.full((), 1.0 if NULL_KEY else 0.0, tl.float32)
    b_mean = tl.zeros((BE,), tl.float32)
    for i_key in range(0, S, BL):
        i_keys = i_key + tl.arange(0, BL)
        b_keys = load_tile(p_keys + first_key, i_keys, S, H * D, D, BD)
        b_values = load_tile(p_values + first_value, i_keys, S, H * E, E, BE)
        logits = tl.load(p_logits + i_row * S + i_keys, mask=i_keys < S, other=float("-inf")) + hidden
        away = tl.maximum(S - i_keys, 1).to(tl.float32)
        b_scores = tl.sum(b_keys * b_query.to(tl.float32)[None, :], axis=1) * scale
        b_scores += (hyper / away - slope * away) + logits
        new_top = tl.maximum(top, tl.max(b_scores, axis=0))
        b_weights = tl.exp(b_scores - finite(new_top))
        shrink = tl.exp(top - finite(new_top))
        total = total * shrink + tl.sum(b_weights, axis=0)
        b_mean = b_mean * shrink + tl.sum(b_weights[:, None] * b_values, axis=0)
        top = new_top
        if NEEDS_STATE:
            i_new = tl.where((i_keys == 0) | (i_keys >= S), S, i_keys - 1)  # the first token is forgotten
            store_tile(p_new_keys + first_key, b_keys, i_new, S, H * D, D, BD)
            store_tile(p_new_values + first_value, b_values, i_new, S, H * E, E, BE)
            if i_head == 0:
                tl.store(p_new_logits + i_row * S + i_new, logits, mask=i_new < S)
    b_mean = b_mean / tl.where(total > 0.0, total, 1.0)
    p_mean += (i_row.to(tl.int64) * H + i_head) * E
    tl.store(p_mean + i_others, narrow(b_mean, p_mean.dtype.element_ty), mask=i_others < E)
    if NEEDS_STATE:
        b_key = tl.load(place(p_key, i_row, i_head, key_b, key_h) + i_columns, mask=i_columns < D, other=0.0)
        b_value = tl.load(place(p_value, i_row, i_head, value_b, value_h) + i_others, mask=i_others < E, other=0.0)
        last = (S - 1).to(tl.int64) * H
        tl.store(p_new_keys + first_key + last * D + i_columns, b_key.to(tl.float32), mask=i_columns < D)
        tl.store(p_new_values + first_value + last * E + i_others, b_value.to(tl.float32), mask=i_others < E)
        if i_head == 0:
            tl.store(p_new_logits + i_row * S + S - 1, tl.load(p_logit + i_row))
