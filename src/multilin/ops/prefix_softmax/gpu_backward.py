"""Backward kernels of the running softmax mean: the forward kernels in reverse, from the last chunk to the first.

Without a window, the means of a chunk are computed again from the kept mean of all tokens before the chunk. If time is
cut into parts, `summarize_rows` first adds up the rows of each part into one row, for which it reads dy.
The gradients of logits also have a term from later parts, one number per head, which `subtract_lost` subtracts last.

With a window, the forward kernel gives the products dy_t . y_t. Three kinds of chunks read a token: the rest of its own
chunk; later chunks whose rows all read the token's whole chunk, each summed up by one row; and one or two chunks after
these, some of whose rows read the token.
"""

import triton
import triton.language as tl

from multilin.ops.kernels.gpu_tiles import dot, finite, load_row, load_tile, narrow, store_tile
from multilin.ops.prefix_softmax.gpu_math import (
    TOKENS,
    UNSPECIALIZED,
    absorb_rows,
    load_texts,
    of_text,
    place,
    text_at,
)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def summarize_rows(
    p_dmeans, s_dmeans, p_texts, rows, p_deltas, sums, T, H, D, cut,
    CHUNK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Sum up each part by one row in (lows, flows, lost); only rows that read tokens before the part count."""
    i_split, i_h, i_part, i_b, first, last, o_d, m_d = place(T, H, D, cut, BLOCK_D)
    p_dmeans += i_b * s_dmeans[0] + i_h * s_dmeans[2]
    p_text = None if p_texts is None else p_texts + i_b * T
    text, o_row = text_at(p_text, first - 1), (i_b * H + i_h) * T
    i_sb = i_split * cut.batch + i_b
    if p_deltas is not None:
        p_deltas += (i_sb * H + i_h) * T
    low, b_flow, lost = float("inf"), tl.zeros((BLOCK_D,), tl.float32), 0.0
    for start in range(first, last, CHUNK):
        o_t = start + tl.arange(0, CHUNK)
        m_t = o_t < last
        b_tops = load_row(rows[0] + o_row, o_t, m_t, 1, float("inf"))
        b_tops = of_text(b_tops, load_texts(p_text, o_t, m_t), text, float("inf"))
        b_scales = load_row(rows[1] + o_row, o_t, m_t, 1, 0.0)
        b_dmeans = load_tile(p_dmeans, o_t, m_t, s_dmeans[1], o_d, m_d)
        b_deltas = 0.0 if p_deltas is None else load_row(p_deltas, o_t, m_t, 1, 0.0)
        low, b_flow, lost = absorb_rows(low, b_flow, lost, b_tops, b_scales, b_dmeans, b_deltas)
    o_part = (i_b * cut.parts + i_part) * H + i_h
    tl.store(sums[0] + o_part, low)
    tl.store(sums[1] + o_part * D + o_d, b_flow, m_d)
    if sums[2] is not None:
        tl.store(sums[2] + (i_sb * cut.parts + i_part) * H + i_h, lost)


@triton.jit
def after_part(
    p_text, sums, dfinal, past, o_final, i_b, i_h, i_part, i_split, T, H, D, last, cut, o_d, m_d, BLOCK_D: tl.constexpr
):
    """One row that summarises the final state and the later parts whose rows all read the whole part."""
    text = text_at(p_text, last - 1)
    low, b_flow, lost = float("inf"), tl.zeros((BLOCK_D,), tl.float32), 0.0
    if dfinal[0] is not None:
        o_state = i_b * H + i_h
        total = tl.load(past[1] + o_final)
        low = tl.where((total > 0) & (text_at(p_text, T - 1) == text), tl.load(past[0] + o_final), float("inf"))
        b_dfinal = tl.load(dfinal[1] + o_state * D + o_d, m_d, 0.0)
        share = tl.where(low < float("inf"), 1.0 / tl.where(total > 0, total, 1.0), 0.0)
        b_flow = share * b_dfinal
        if i_part == cut.parts - 1:
            b_mean = tl.load(past[2] + o_final * D + o_d, m_d, 0.0)
            dlogit = tl.where(i_split == 0, tl.load(dfinal[0] + o_state), 0.0)
            lost = share * (tl.sum(b_dfinal * b_mean, axis=0) - dlogit)
    if sums[0] is not None:
        end = tl.minimum(i_part + cut.whole + 1, cut.parts)
        for i_first in range(i_part + 1, end, TOKENS):
            o_p = i_first + tl.arange(0, TOKENS)
            m_p = o_p < end
            if p_text is not None:
                m_p &= tl.load(p_text + o_p * cut.length - 1, m_p, -1) == text
            o_part = (i_b * cut.parts + o_p) * H + i_h
            b_lows = tl.load(sums[0] + o_part, m_p, float("inf"))
            b_flows = tl.load(sums[1] + o_part[:, None] * D + o_d[None, :], m_p[:, None] & m_d[None, :], 0.0)
            b_lost = 0.0
            if sums[2] is not None:
                o_lost = ((i_split * cut.batch + i_b) * cut.parts + o_p) * H + i_h
                b_lost = tl.load(sums[2] + o_lost, m_p, 0.0)
            low, b_flow, lost = absorb_rows(low, b_flow, lost, b_lows, 1.0, b_flows, b_lost)
    return low, b_flow, lost


@triton.jit
def read_later(
    b_logits, b_text, o_t, ahead, T, window, p_tops, p_scales, p_deltas, p_text, p_dmeans, dmeans_t, o_d, m_d
):
    """The terms of the rows `ahead` positions later, for the gradients of values (added) and of logits (subtracted)."""
    o_later = o_t + ahead
    m_later = o_later < T
    is_read = o_later[:, None] - o_t[None, :] < window
    is_read &= load_texts(p_text, o_later, m_later)[:, None] == b_text[None, :]
    b_tops = load_row(p_tops, o_later, m_later, 1, float("inf"))
    b_weights = tl.exp(tl.where(is_read, b_logits[None, :], -float("inf")) - b_tops[:, None])
    b_dmeans = load_tile(p_dmeans, o_later, m_later, dmeans_t, o_d, m_d)
    b_shares = narrow(b_weights * load_row(p_scales, o_later, m_later, 1, 0.0)[:, None], b_dmeans.dtype)
    b_deltas = load_row(p_deltas, o_later, m_later, 1, 0.0)
    return dot(tl.trans(b_shares), b_dmeans), tl.sum(b_shares.to(tl.float32) * b_deltas[:, None], axis=0)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def backward(
    p_logits, s_logits, p_values, s_values, p_own, s_own, p_texts, p_dmeans, s_dmeans, dfinal, sums,
    rows, past, p_deltas, p_dvalues, p_dlogits, p_down, dstate, ends, T, H, D, cut, num_slots, window,
    CHUNK: tl.constexpr, BLOCK_D: tl.constexpr, NUM_OLD: tl.constexpr, CARRIES: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one part; if `ends` are given, `subtract_lost` completes the gradients of logits."""
    i_split, i_h, i_part, i_b, first, last, o_d, m_d = place(T, H, D, cut, BLOCK_D)
    p_logits += i_b * s_logits[0] + i_h * s_logits[2]
    p_values += i_b * s_values[0] + i_h * s_values[2]
    p_dmeans += i_b * s_dmeans[0] + i_h * s_dmeans[2]
    p_text = None if p_texts is None else p_texts + i_b * T
    i_bh, i_sb = i_b * H + i_h, i_split * cut.batch + i_b
    p_tops, p_scales = rows[0] + i_bh * T, rows[1] + i_bh * T
    o_slots, o_out = i_bh * num_slots, i_sb * T * H + i_h
    o_part = (i_sb * cut.parts + i_part) * H + i_h
    low, b_flow, lost = float("inf"), tl.zeros((BLOCK_D,), tl.float32), 0.0
    if CARRIES:
        low, b_flow, lost = after_part(
            p_text, sums, dfinal, past, o_slots + num_slots - 1, i_b, i_h, i_part, i_split, T, H, D, last, cut,
            o_d, m_d, BLOCK_D,
        )  # fmt: skip
    if ends[0] is not None:
        tl.store(ends[1] + o_part, low)
    if NUM_OLD > 0:
        p_deltas += (i_sb * H + i_h) * T
    for i_back in range(0, tl.cdiv(last - first, CHUNK)):
        i_chunk = tl.cdiv(last - first, CHUNK) - 1 - i_back
        start = first + i_chunk * CHUNK
        o_t = start + tl.arange(0, CHUNK)
        m_t = o_t < last
        b_logits = load_row(p_logits, o_t, m_t, s_logits[1], -float("inf"))
        b_values = load_tile(p_values, o_t, m_t, s_values[1], o_d, m_d)
        b_dmeans = load_tile(p_dmeans, o_t, m_t, s_dmeans[1], o_d, m_d)
        b_wide_values, b_wide_dmeans = b_values.to(tl.float32), b_dmeans.to(tl.float32)
        b_tops = load_row(p_tops, o_t, m_t, 1, float("inf"))
        b_scales = load_row(p_scales, o_t, m_t, 1, 0.0)
        distance, b_text = o_t[:, None] - o_t[None, :], load_texts(p_text, o_t, m_t)
        visible = (distance >= 0) & (b_text[:, None] == b_text[None, :])
        if NUM_OLD > 0:
            visible &= distance < window
        text_before, text_after = text_at(p_text, start - 1), text_at(p_text, tl.minimum(start + CHUNK, last) - 1)
        b_before_tops = of_text(b_tops, b_text, text_before, float("inf"))
        b_weights = tl.exp(tl.where(visible, b_logits[None, :], -float("inf")) - b_tops[:, None])
        if p_own is not None:
            b_own = load_row(p_own + i_b * s_own[0] + i_h * s_own[2], o_t, m_t, s_own[1], -float("inf"))
            b_own = tl.exp(b_own - b_tops)
        if NUM_OLD > 0:
            b_deltas = load_row(p_deltas, o_t, m_t, 1, 0.0)
        else:
            o_slot = o_slots + start // CHUNK
            b_past = tl.load(past[1] + o_slot) * tl.exp(tl.load(past[0] + o_slot) - b_before_tops)
            b_mean = tl.load(past[2] + o_slot * D + o_d, m_d, 0.0)
            b_sums = dot(narrow(b_weights, b_values.dtype), b_values) + b_past[:, None] * b_mean[None, :]
            if p_own is not None:
                b_sums += b_own[:, None] * b_wide_values
            b_deltas = b_scales * tl.sum(b_sums * b_wide_dmeans, axis=1)

        b_shares = narrow(b_weights * b_scales[:, None], b_values.dtype)
        b_dvalues = dot(tl.trans(b_shares), b_dmeans)
        b_lost = tl.sum(b_shares.to(tl.float32) * b_deltas[:, None], axis=0)
        if NUM_OLD > 0:
            b_more, b_more_lost = read_later(
                b_logits, b_text, o_t, cut.apart, T, window, p_tops, p_scales, p_deltas, p_text, p_dmeans, s_dmeans[1],
                o_d, m_d,
            )  # fmt: skip
            b_dvalues += b_more
            b_lost += b_more_lost
        if NUM_OLD > 1:
            b_more, b_more_lost = read_later(
                b_logits, b_text, o_t, cut.apart - CHUNK, T, window, p_tops, p_scales, p_deltas, p_text, p_dmeans,
                s_dmeans[1], o_d, m_d,
            )  # fmt: skip
            b_dvalues += b_more
            b_lost += b_more_lost
        if CARRIES:
            b_read = tl.exp(of_text(b_logits, b_text, text_after, -float("inf")) - low)
            b_dvalues += b_read[:, None] * b_flow[None, :]
            b_lost += b_read * lost
        if NUM_OLD == 0:
            low = tl.where(text_before == text_after, low, float("inf"))
            low, b_flow, lost = absorb_rows(low, b_flow, lost, b_before_tops, b_scales, b_dmeans, b_deltas)
        b_dlogits = tl.sum(b_wide_values * b_dvalues, axis=1) - b_lost
        tl.store(p_dlogits + o_out + o_t.to(tl.int64) * H, b_dlogits, m_t)
        if p_own is not None:
            b_own *= b_scales
            b_down = b_own * (tl.sum(b_wide_dmeans * b_wide_values, axis=1) - b_deltas)
            tl.store(p_down + o_out + o_t.to(tl.int64) * H, b_down, m_t)
            b_dvalues += b_own[:, None] * b_wide_dmeans
        store_tile(p_dvalues + (i_b * T * H + i_h) * D, o_t, m_t, H * D, o_d, m_d, b_dvalues)

    if ends[0] is not None:
        tl.store(ends[0] + o_part, low)
        tl.store(ends[2] + o_part, lost)
    if dstate[0] is not None:
        if i_part == 0:
            top, total = tl.load(past[0] + o_slots), tl.load(past[1] + o_slots)
            b_dvalues = total * tl.exp(top - low) * b_flow
            dlogit = tl.sum(b_dvalues * tl.load(past[2] + o_slots * D + o_d, m_d, 0.0), axis=0)
            dlogit -= total * tl.exp(top - low) * lost
            tl.store(dstate[1] + i_bh * D + o_d, b_dvalues, m_d)
            tl.store(dstate[0] + i_split * cut.batch * H + i_bh, dlogit)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def subtract_lost(
    p_logits, s_logits, p_texts, past, p_dlogits, dstate, ends, T, H, cut, num_slots,
    CHUNK: tl.constexpr, MAX_PARTS: tl.constexpr,
):  # fmt: skip
    """Subtract the term of later parts from the gradients of a part's logits, and of the state's logit."""
    i_split, i_h, i_part, i_b, first, last, _, _ = place(T, H, 1, cut, 1)
    p_logits += i_b * s_logits[0] + i_h * s_logits[2]
    p_text = None if p_texts is None else p_texts + i_b * T
    text_after = text_at(p_text, last - 1)
    o_p = tl.arange(0, MAX_PARTS)
    m_p = o_p < cut.parts
    b_text_before = tl.zeros((MAX_PARTS,), tl.int32)
    if p_text is not None:
        b_text_before = tl.load(p_text + o_p * cut.length - 1, m_p & (o_p > 0), 0)
    i_sb = i_split * cut.batch + i_b
    o_part = (i_sb * cut.parts + o_p) * H + i_h
    b_lows = tl.load(ends[0] + o_part, m_p, float("inf"))
    b_lost = tl.load(ends[2] + o_part, m_p, 0.0)
    low = tl.load(ends[1] + (i_sb * cut.parts + i_part) * H + i_h)
    b_after = (o_p > i_part) & (b_text_before == text_after)
    lost = tl.sum(b_lost * tl.exp(finite(low) - tl.where(b_after, b_lows, float("inf"))), axis=0)
    for start in range(first, last, CHUNK):
        o_t = start + tl.arange(0, CHUNK)
        m_t = o_t < last
        b_logits = load_row(p_logits, o_t, m_t, s_logits[1], -float("inf"))
        b_logits = of_text(b_logits, load_texts(p_text, o_t, m_t), text_after, -float("inf"))
        p_out = p_dlogits + i_sb * T * H + i_h + o_t.to(tl.int64) * H
        tl.store(p_out, tl.load(p_out, m_t, 0.0) - tl.exp(b_logits - low) * lost, m_t)
    if dstate[0] is not None:
        if i_part == 0:
            o_slot = (i_b * H + i_h) * num_slots
            p_out = dstate[0] + i_sb * H + i_h
            b_after = (o_p > 0) & (b_text_before == 0)
            b_read = tl.exp(tl.load(past[0] + o_slot) - tl.where(b_after, b_lows, float("inf")))
            tl.store(p_out, tl.load(p_out) - tl.load(past[1] + o_slot) * tl.sum(b_read * b_lost, axis=0))
