"""Forward kernels of the running softmax mean: over the whole past, over a window, and for a single position.

A program computes a part of the time of one head. Without a window, time is cut into parts if texts and heads alone do
not fill the GPU. Then `summarize` first sums up each part by one token, for which it reads the values once more, and a
program of `forward` begins with the tokens of the parts before its own, merged into one.

With a window, a part is one chunk. A row (position) reads three kinds of chunks: its own chunk, up to the row; chunks
that all rows of its chunk read completely, by one token each; and one or two old chunks, where windows begin.
"""

import triton
import triton.language as tl

from multilin.ops.kernels.gpu_tiles import dot, finite, inverse, load_row, load_tile, narrow, store_rounded, store_tile
from multilin.ops.prefix_softmax.gpu_math import (
    TOKENS,
    UNSPECIALIZED,
    absorb,
    load_texts,
    log_of,
    of_text,
    place,
    store_token,
    text_at,
    top_and_total,
)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def summarize(
    p_logits, s_logits, p_values, s_values, p_texts, tokens, T, H, D, cut,
    CHUNK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Sum up each part by one token in (tops, totals, means); only the text with which the part ends counts."""
    _, i_h, i_part, i_b, first, last, o_d, m_d = place(T, H, D, cut, BLOCK_D)
    p_logits += i_b * s_logits[0] + i_h * s_logits[2]
    p_values += i_b * s_values[0] + i_h * s_values[2]
    p_text = None if p_texts is None else p_texts + i_b * T
    text = text_at(p_text, last - 1)
    top, total, b_mean = -float("inf"), 0.0, tl.zeros((BLOCK_D,), tl.float32)
    for start in range(first, last, CHUNK):
        o_t = start + tl.arange(0, CHUNK)
        m_t = o_t < last
        b_logits = load_row(p_logits, o_t, m_t, s_logits[1], -float("inf"))
        b_logits = of_text(b_logits, load_texts(p_text, o_t, m_t), text, -float("inf"))
        b_values = load_tile(p_values, o_t, m_t, s_values[1], o_d, m_d)
        top, total, b_mean = absorb(top, total, b_mean, b_logits, 1.0, b_values)
    store_token(tokens, (i_b * cut.parts + i_part) * H + i_h, D, o_d, m_d, top, total, b_mean)


@triton.jit
def before_part(p_text, state, tokens, i_b, i_h, i_part, H, D, cut, o_d, m_d, BLOCK_D: tl.constexpr):
    """One token that summarises the state and the earlier parts that a part reads completely.

    Only tokens of the text with which the previous part ends count.
    """
    text = text_at(p_text, i_part * cut.length - 1)
    top, total, b_mean = -float("inf"), 0.0, tl.zeros((BLOCK_D,), tl.float32)
    if state[0] is not None:
        o_state = i_b * H + i_h
        top, total = top_and_total(tl.where(text == 0, tl.load(state[0] + o_state), -float("inf")))
        b_mean = tl.where(total > 0, tl.load(state[1] + o_state * D + o_d, m_d, 0.0), 0.0)
    if tokens[0] is not None:
        for i_first in range(tl.maximum(i_part - cut.whole, 0), i_part, TOKENS):
            o_p = i_first + tl.arange(0, TOKENS)
            m_p = o_p < i_part
            if p_text is not None:
                m_p &= tl.load(p_text + (o_p + 1) * cut.length - 1, m_p, -1) == text
            o_part = (i_b * cut.parts + o_p) * H + i_h
            b_tops = tl.load(tokens[0] + o_part, m_p, -float("inf"))
            b_totals = tl.load(tokens[1] + o_part, m_p, 0.0)
            b_means = tl.load(tokens[2] + o_part[:, None] * D + o_d[None, :], m_p[:, None] & m_d[None, :], 0.0)
            top, total, b_mean = absorb(top, total, b_mean, b_tops, b_totals, b_means)
    return top, total, b_mean


@triton.jit
def score_old(p_logits, logits_t, p_text, o_t, b_text, back, window):
    """For each row the logits of the chunk `back` positions before, -inf outside of the row's window and text."""
    o_old = o_t - back
    m_old = o_old >= 0
    is_read = o_t[:, None] - o_old[None, :] < window
    is_read &= b_text[:, None] == load_texts(p_text, o_old, m_old)[None, :]
    return tl.where(is_read, load_row(p_logits, o_old, m_old, logits_t, -float("inf"))[None, :], -float("inf"))


@triton.jit
def sum_old(b_scores, b_shift, p_values, values_t, o_t, back, o_d, m_d):
    """For each row of scores, the total of its weights and the weighted sum of the values."""
    o_old = o_t - back
    b_values = load_tile(p_values, o_old, o_old >= 0, values_t, o_d, m_d)
    b_weights = narrow(tl.exp(b_scores - b_shift[:, None]), b_values.dtype)
    return tl.sum(b_weights.to(tl.float32), axis=1), dot(b_weights, b_values)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def forward(
    p_logits, s_logits, p_values, s_values, p_own, s_own, p_texts, state, tokens, p_dmeans, s_dmeans,
    p_means, final, rows, past, p_deltas, T, H, D, cut, num_slots, window, null,
    CHUNK: tl.constexpr, BLOCK_D: tl.constexpr, NUM_OLD: tl.constexpr, CARRIES: tl.constexpr,
):  # fmt: skip
    """Compute one part's means, the state after the last part, and the tensors of `empty_kept`; None skips a result.

    Given dy instead of means, compute the products dy_t . y_t. NUM_OLD is the number of old chunks, 0 without a window.
    Without CARRIES, a row reads only its own chunk and the old chunks.
    """
    i_split, i_h, i_part, i_b, first, last, o_d, m_d = place(T, H, D, cut, BLOCK_D)
    p_logits += i_b * s_logits[0] + i_h * s_logits[2]
    p_values += i_b * s_values[0] + i_h * s_values[2]
    p_text = None if p_texts is None else p_texts + i_b * T
    i_bh = i_b * H + i_h
    top, total, b_mean = -float("inf"), 0.0, tl.zeros((BLOCK_D,), tl.float32)
    if CARRIES:
        top, total, b_mean = before_part(p_text, state, tokens, i_b, i_h, i_part, H, D, cut, o_d, m_d, BLOCK_D)
    for start in range(first, last, CHUNK):
        o_t = start + tl.arange(0, CHUNK)
        m_t = o_t < last
        b_logits = load_row(p_logits, o_t, m_t, s_logits[1], -float("inf"))
        b_values = load_tile(p_values, o_t, m_t, s_values[1], o_d, m_d)
        distance, b_text = o_t[:, None] - o_t[None, :], load_texts(p_text, o_t, m_t)
        visible = (distance >= 0) & (b_text[:, None] == b_text[None, :])
        if NUM_OLD > 0:
            visible &= distance < window
        b_scores = tl.where(visible, b_logits[None, :], -float("inf"))
        b_other = null  # the null token, or the own term
        if p_own is not None:
            b_other = load_row(p_own + i_b * s_own[0] + i_h * s_own[2], o_t, m_t, s_own[1], -float("inf"))
        b_tops = tl.maximum(tl.max(b_scores, axis=1), b_other)
        if NUM_OLD > 0:
            b_far_scores = score_old(p_logits, s_logits[1], p_text, o_t, b_text, cut.apart, window)
            b_tops = tl.maximum(b_tops, tl.max(b_far_scores, axis=1))
        if NUM_OLD > 1:
            b_near_scores = score_old(p_logits, s_logits[1], p_text, o_t, b_text, cut.apart - CHUNK, window)
            b_tops = tl.maximum(b_tops, tl.max(b_near_scores, axis=1))
        if CARRIES:
            b_past_top = of_text(top, b_text, text_at(p_text, start - 1), -float("inf"))
            b_tops = tl.maximum(b_tops, b_past_top)

        b_shift = finite(b_tops)
        b_weights = narrow(tl.exp(b_scores - b_shift[:, None]), b_values.dtype)
        b_other = tl.exp(b_other - b_shift)
        b_totals = tl.sum(b_weights.to(tl.float32), axis=1) + b_other
        b_sums = dot(b_weights, b_values)
        if NUM_OLD > 0:
            b_more, b_more_sums = sum_old(b_far_scores, b_shift, p_values, s_values[1], o_t, cut.apart, o_d, m_d)
            b_totals += b_more
            b_sums += b_more_sums
        if NUM_OLD > 1:
            b_more, b_more_sums = sum_old(
                b_near_scores, b_shift, p_values, s_values[1], o_t, cut.apart - CHUNK, o_d, m_d
            )
            b_totals += b_more
            b_sums += b_more_sums
        if CARRIES:
            b_past = total * tl.exp(b_past_top - b_shift)
            b_totals += b_past
            b_sums += b_past[:, None] * b_mean[None, :]
        if p_own is not None:
            b_sums += b_other[:, None] * b_values.to(tl.float32)
        b_scales = inverse(b_totals)
        b_means = b_sums * b_scales[:, None]
        if p_means is not None:
            store_tile(p_means + (i_b * T * H + i_h) * D, o_t, m_t, H * D, o_d, m_d, b_means)
        if rows[0] is not None:
            tl.store(rows[0] + i_bh * T + o_t, tl.where(b_scales > 0, b_tops, float("inf")), m_t)
            tl.store(rows[1] + i_bh * T + o_t, b_scales, m_t)
        if past[0] is not None:
            store_token(past, i_bh * num_slots + start // CHUNK, D, o_d, m_d, top, total, b_mean)
        if p_dmeans is not None:
            b_dmeans = load_tile(p_dmeans + i_b * s_dmeans[0] + i_h * s_dmeans[2], o_t, m_t, s_dmeans[1], o_d, m_d)
            b_deltas = tl.sum(b_means * b_dmeans.to(tl.float32), axis=1)
            tl.store(p_deltas + ((i_split * cut.batch + i_b) * H + i_h) * T + o_t, b_deltas, m_t)

        if NUM_OLD == 0:
            text_after = text_at(p_text, tl.minimum(start + CHUNK, last) - 1)
            top = tl.where(text_at(p_text, start - 1) == text_after, top, -float("inf"))
            b_logits = of_text(b_logits, b_text, text_after, -float("inf"))
            top, total, b_mean = absorb(top, total, b_mean, b_logits, 1.0, b_values)
    if i_part == cut.parts - 1:
        if final[0] is not None:
            tl.store(final[0] + i_bh, log_of(top, total))
            tl.store(final[1] + i_bh * D + o_d, b_mean, m_d)
        if past[0] is not None:
            store_token(past, i_bh * num_slots + num_slots - 1, D, o_d, m_d, top, total, b_mean)


@triton.jit
def step(
    p_logits, s_logits, p_values, s_values, p_own, s_own, p_starts, state, p_means, final, H, D, num_past, null,
    CHUNK: tl.constexpr, BLOCK_D: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Compute one position's mean and the next state. With a window, the state's tokens move by one place."""
    i_h, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < D
    logit = tl.load(p_logits + i_b * s_logits[0] + i_h * s_logits[2])
    b_value = tl.load(p_values + i_b * s_values[0] + i_h * s_values[2] + o_d, m_d, 0.0).to(tl.float32)
    top, total = logit, tl.where(logit > -float("inf"), 1.0, 0.0)
    b_mean = tl.where(total > 0, b_value, 0.0)
    if state[0] is not None:
        for start in range(0, num_past, CHUNK):
            o_s = start + tl.arange(0, CHUNK)
            m_s = o_s < num_past
            o_state = (i_b * num_past + o_s) * H + i_h
            b_logits, b_totals = tl.load(state[0] + o_state, m_s, -float("inf")), 1.0
            if not WINDOWED:
                b_logits, b_totals = top_and_total(b_logits)
            if p_starts is not None:
                b_logits = tl.where(tl.load(p_starts + i_b) != 0, -float("inf"), b_logits)
            b_values = tl.load(state[1] + o_state[:, None] * D + o_d[None, :], m_s[:, None] & m_d[None, :], 0.0)
            top, total, b_mean = absorb(top, total, b_mean, b_logits, b_totals, b_values)
            if WINDOWED:
                if final[0] is not None:
                    o_moved, m_moved = o_state - H, m_s & (o_s > 0)
                    tl.store(final[0] + o_moved, b_logits, m_moved)
                    tl.store(final[1] + o_moved[:, None] * D + o_d[None, :], b_values, m_moved[:, None] & m_d[None, :])
    if final[0] is not None:
        if num_past > 0:
            o_state = (i_b * num_past + num_past - 1) * H + i_h
            if WINDOWED:
                tl.store(final[0] + o_state, logit)
                tl.store(final[1] + o_state * D + o_d, b_value, m_d)
            else:
                tl.store(final[0] + o_state, log_of(top, total))
                tl.store(final[1] + o_state * D + o_d, b_mean, m_d)
    other = null
    if p_own is not None:
        other = tl.load(p_own + i_b * s_own[0] + i_h * s_own[2])
    shift = finite(tl.maximum(top, other))
    past, other = total * tl.exp(top - shift), tl.exp(other - shift)
    b_sum = past * b_mean
    if p_own is not None:
        b_sum += other * b_value
    store_rounded(p_means + (i_b * H + i_h) * D + o_d, b_sum * inverse(past + other), m_d)
