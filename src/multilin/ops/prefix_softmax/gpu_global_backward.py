"""Backward kernels over the whole past: chunks from last to first, means computed again from those kept per chunk.

Where time is cut in parts, the rows of each part are summed up by one row first. That takes dy alone: what later parts
take from the gradients of logits, one number per head, is subtracted at the end.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

from multilin.ops.kernels.gpu_launch import autotuned
from multilin.ops.kernels.gpu_tiles import dot, narrow
from multilin.ops.prefix_softmax.gpu_global import WAYS
from multilin.ops.prefix_softmax.gpu_math import absorb_rows, finite, load_row, load_tile, store_tile, text_at


@autotuned(WAYS, key=["H", "D", "CHUNK", "BLOCK_D", "PARTS"])
@triton.jit
def summarize_rows(
    p_dmeans, dmeans_b, dmeans_t, dmeans_h, p_texts, p_tops, p_scales, p_part_lows, p_part_flows,
    T, H, D, part_length, num_parts, num_splits,
    CHUNK: tl.constexpr, BLOCK_D: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Each part's rows as one: those that still read what was before the part."""
    i = tl.program_id(0)
    i_split, i_h = i % num_splits, i // num_splits % H
    i_part, i_b = i // (num_splits * H) % num_parts, (i // (num_splits * H * num_parts)).to(tl.int64)
    p_dmeans += i_b * dmeans_b + i_h * dmeans_h
    o_row = (i_b * H + i_h) * T
    o_d = i_split * BLOCK_D + tl.arange(0, BLOCK_D)
    m_d = o_d < D
    first = i_part * part_length
    last = tl.minimum(first + part_length, T)
    b_zeros = tl.zeros((CHUNK,), tl.float32)
    low, b_flow = float("inf"), tl.zeros((BLOCK_D,), tl.float32)
    for start in range(first, last, CHUNK):
        o_t = start + tl.arange(0, CHUNK)
        m_t = o_t < last
        b_tops = load_row(p_tops + o_row, o_t, m_t, 1, float("inf"))
        if p_texts is not None:
            b_text = load_row(p_texts + i_b * T, o_t, m_t, 1, -1)
            b_tops = tl.where(b_text == text_at(p_texts + i_b * T, first - 1), b_tops, float("inf"))
        b_scales = load_row(p_scales + o_row, o_t, m_t, 1, 0.0)
        b_dmeans = load_tile(p_dmeans, o_t, m_t, dmeans_t, o_d, m_d)
        low, b_flow, _ = absorb_rows(low, b_flow, 0.0, b_tops, b_scales, b_dmeans, b_zeros)
    o_part = (i_b * num_parts + i_part) * H + i_h
    tl.store(p_part_lows + o_part, low)
    tl.store(p_part_flows + o_part * D + o_d, b_flow, m_d)


@triton.jit
def after_part(
    p_texts, p_part_lows, p_part_flows, p_dfinal_logits, p_dfinal_values, p_past_tops, p_past_totals, p_past_means,
    o_final, i_b, i_h, i_part, i_split, H, D, T, last, part_length, num_parts, o_d, m_d,
    PARTS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The row that stands for all after a part: the rows of the parts after it, and the final state as one of them."""
    text = 0
    low, b_flow, lost = float("inf"), tl.zeros((BLOCK_D,), tl.float32), 0.0
    if p_texts is not None:
        text = text_at(p_texts + i_b * T, last - 1)
    if p_dfinal_logits is not None:
        o_state = i_b * H + i_h
        total = tl.load(p_past_totals + o_final)
        low = tl.where(total > 0, tl.load(p_past_tops + o_final), float("inf"))
        if p_texts is not None:
            low = tl.where(text_at(p_texts + i_b * T, T - 1) == text, low, float("inf"))
        b_dfinal = tl.load(p_dfinal_values + o_state * D + o_d, m_d, 0.0)
        share = tl.where(low < float("inf"), 1.0 / tl.where(total > 0, total, 1.0), 0.0)
        b_flow = share * b_dfinal
        if i_part == num_parts - 1:
            b_mean = tl.load(p_past_means + o_final * D + o_d, m_d, 0.0)
            dlogit = tl.where(i_split == 0, tl.load(p_dfinal_logits + o_state), 0.0)
            lost = share * (tl.sum(b_dfinal * b_mean, axis=0) - dlogit)
    if PARTS > 1:
        o_p = tl.arange(0, PARTS)
        m_p = (o_p > i_part) & (o_p < num_parts)
        if p_texts is not None:
            m_p &= tl.load(p_texts + i_b * T + o_p * part_length - 1, m_p, -1) == text
        o_part = (i_b * num_parts + o_p) * H + i_h
        b_lows = tl.load(p_part_lows + o_part, m_p, float("inf"))
        b_flows = tl.load(p_part_flows + o_part[:, None] * D + o_d[None, :], m_p[:, None] & m_d[None, :], 0.0)
        b_zeros = tl.zeros((PARTS,), tl.float32)
        low, b_flow, lost = absorb_rows(low, b_flow, lost, b_lows, b_zeros + 1.0, b_flows, b_zeros)
    return low, b_flow, lost


@autotuned(WAYS, key=["H", "D", "CHUNK", "BLOCK_D", "PARTS"])
@triton.jit
def backward(
    p_logits, logits_b, logits_t, logits_h, p_values, values_b, values_t, values_h, p_own, own_b, own_t, own_h,
    p_texts, p_dmeans, dmeans_b, dmeans_t, dmeans_h, p_dfinal_logits, p_dfinal_values, p_part_lows, p_part_flows,
    p_tops, p_scales, p_past_tops, p_past_totals, p_past_means,
    p_dvalues, p_dlogits, p_down, p_dstate_logits, p_dstate_values, p_lows_before, p_lows_after, p_lost,
    T, H, D, part_length, num_parts, num_splits, num_chunks, num_batch,
    CHUNK: tl.constexpr, BLOCK_D: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Gradients of one part; those of logits without what later parts take from them."""
    i = tl.program_id(0)
    i_split, i_h = i % num_splits, i // num_splits % H
    i_part, i_b = i // (num_splits * H) % num_parts, (i // (num_splits * H * num_parts)).to(tl.int64)
    p_logits += i_b * logits_b + i_h * logits_h
    p_values += i_b * values_b + i_h * values_h
    p_dmeans += i_b * dmeans_b + i_h * dmeans_h
    p_dvalues += (i_b * T * H + i_h) * D
    o_row, o_chunk = (i_b * H + i_h) * T, (i_b * H + i_h) * (num_chunks + 1)
    o_out = ((i_split * num_batch + i_b) * T) * H + i_h
    o_d = i_split * BLOCK_D + tl.arange(0, BLOCK_D)
    m_d = o_d < D
    first = i_part * part_length
    last = tl.minimum(first + part_length, T)
    low, b_flow, lost = after_part(
        p_texts, p_part_lows, p_part_flows, p_dfinal_logits, p_dfinal_values, p_past_tops, p_past_totals, p_past_means,
        o_chunk + num_chunks, i_b, i_h, i_part, i_split, H, D, T, last, part_length, num_parts, o_d, m_d,
        PARTS, BLOCK_D,
    )  # fmt: skip
    o_part = ((i_split * num_batch + i_b) * num_parts + i_part) * H + i_h
    if PARTS > 1:
        tl.store(p_lows_after + o_part, low)
    for i_back in range(0, tl.cdiv(last - first, CHUNK)):
        start = first + (tl.cdiv(last - first, CHUNK) - 1 - i_back) * CHUNK
        o_t = start + tl.arange(0, CHUNK)
        m_t = o_t < last
        b_logits = load_row(p_logits, o_t, m_t, logits_t, -float("inf"))
        b_values = load_tile(p_values, o_t, m_t, values_t, o_d, m_d)
        b_dmeans = load_tile(p_dmeans, o_t, m_t, dmeans_t, o_d, m_d)
        b_tops = load_row(p_tops + o_row, o_t, m_t, 1, float("inf"))
        b_scales = load_row(p_scales + o_row, o_t, m_t, 1, 0.0)
        o_slot = o_chunk + start // CHUNK
        b_mean = tl.load(p_past_means + o_slot * D + o_d, m_d, 0.0)
        b_before_tops, b_late_logits = b_tops, b_logits
        visible = o_t[:, None] >= o_t[None, :]
        if p_texts is not None:
            b_text = load_row(p_texts + i_b * T, o_t, m_t, 1, -1)
            text_before = text_at(p_texts + i_b * T, start - 1)
            text_after = text_at(p_texts + i_b * T, tl.minimum(start + CHUNK, last) - 1)
            visible &= b_text[:, None] == b_text[None, :]
            b_late_logits = tl.where(b_text == text_after, b_logits, -float("inf"))
            b_before_tops = tl.where(b_text == text_before, b_tops, float("inf"))
        b_read = tl.exp(b_late_logits - low)
        b_past = tl.load(p_past_totals + o_slot) * tl.exp(tl.load(p_past_tops + o_slot) - b_before_tops)

        b_weights = tl.exp(tl.where(visible, b_logits[None, :], -float("inf")) - b_tops[:, None])
        b_sums = dot(narrow(b_weights, b_values.dtype), b_values) + b_past[:, None] * b_mean[None, :]
        b_wide_values, b_wide_dmeans = b_values.to(tl.float32), b_dmeans.to(tl.float32)
        if p_own is not None:
            b_own = load_row(p_own + i_b * own_b + i_h * own_h, o_t, m_t, own_t, -float("inf"))
            b_own = tl.exp(b_own - b_tops)
            b_sums += b_own[:, None] * b_wide_values
        b_deltas = b_scales * tl.sum(b_sums * b_wide_dmeans, axis=1)

        b_shares = narrow(b_weights * b_scales[:, None], b_values.dtype)
        b_dvalues = dot(tl.trans(b_shares), b_dmeans) + b_read[:, None] * b_flow[None, :]
        b_dlogits = tl.sum(b_wide_values * b_dvalues, axis=1) - b_read * lost
        b_dlogits -= tl.sum(b_shares.to(tl.float32) * b_deltas[:, None], axis=0)
        tl.store(p_dlogits + o_out + o_t.to(tl.int64) * H, b_dlogits, m_t)
        if p_own is not None:
            b_own *= b_scales
            b_down = b_own * (tl.sum(b_wide_dmeans * b_wide_values, axis=1) - b_deltas)
            tl.store(p_down + o_out + o_t.to(tl.int64) * H, b_down, m_t)
            b_dvalues += b_own[:, None] * b_wide_dmeans
        store_tile(p_dvalues, o_t, m_t, H * D, o_d, m_d, b_dvalues)
        if p_texts is not None:
            low = tl.where(text_before == text_after, low, float("inf"))
        low, b_flow, lost = absorb_rows(low, b_flow, lost, b_before_tops, b_scales, b_dmeans, b_deltas)

    if PARTS > 1:
        tl.store(p_lows_before + o_part, low)
        tl.store(p_lost + o_part, lost)
    if p_dstate_logits is not None:
        if i_part == 0:
            top, total = tl.load(p_past_tops + o_chunk), tl.load(p_past_totals + o_chunk)
            b_dvalues = total * tl.exp(top - low) * b_flow
            dlogit = tl.sum(b_dvalues * tl.load(p_past_means + o_chunk * D + o_d, m_d, 0.0), axis=0)
            dlogit -= total * tl.exp(top - low) * lost
            o_state = i_b * H + i_h
            tl.store(p_dstate_values + o_state * D + o_d, b_dvalues, m_d)
            tl.store(p_dstate_logits + i_split * num_batch * H + o_state, dlogit)


@triton.jit
def subtract_lost(
    p_logits, logits_b, logits_t, logits_h, p_texts, p_past_tops, p_past_totals,
    p_dlogits, p_dstate_logits, p_lows_before, p_lows_after, p_lost,
    T, H, part_length, num_parts, num_splits, num_chunks, num_batch,
    CHUNK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Subtract from the gradients of a part's logits, and the state's, what the parts after it take from them."""
    i = tl.program_id(0)
    i_h, i_part, i_b = i % H, i // H % num_parts, (i // (H * num_parts) % num_batch).to(tl.int64)
    i_split = i // (H * num_parts * num_batch)
    p_logits += i_b * logits_b + i_h * logits_h
    first = i_part * part_length
    last = tl.minimum(first + part_length, T)
    o_p = tl.arange(0, PARTS)
    m_p = o_p < num_parts
    b_text_before = tl.zeros((PARTS,), tl.int32)
    text_after, text_state = 0, 0
    if p_texts is not None:
        b_text_before = tl.load(p_texts + i_b * T + o_p * part_length - 1, m_p & (o_p > 0), 0)
        text_after = text_at(p_texts + i_b * T, last - 1)
    o_part = ((i_split * num_batch + i_b) * num_parts + o_p) * H + i_h
    b_lows = tl.load(p_lows_before + o_part, m_p, float("inf"))
    b_lost = tl.load(p_lost + o_part, m_p, 0.0)
    low = tl.load(p_lows_after + ((i_split * num_batch + i_b) * num_parts + i_part) * H + i_h)
    b_after = (o_p > i_part) & (b_text_before == text_after)
    lost = tl.sum(b_lost * tl.exp(finite(low) - tl.where(b_after, b_lows, float("inf"))), axis=0)
    o_out = ((i_split * num_batch + i_b) * T) * H + i_h
    for start in range(first, last, CHUNK):
        o_t = start + tl.arange(0, CHUNK)
        m_t = o_t < last
        b_logits = load_row(p_logits, o_t, m_t, logits_t, -float("inf"))
        if p_texts is not None:
            b_text = load_row(p_texts + i_b * T, o_t, m_t, 1, -1)
            b_logits = tl.where(b_text == text_after, b_logits, -float("inf"))
        p_out = p_dlogits + o_out + o_t.to(tl.int64) * H
        tl.store(p_out, tl.load(p_out, m_t, 0.0) - tl.exp(b_logits - low) * lost, m_t)
    if p_dstate_logits is not None:
        if i_part == 0:
            o_slot = (i_b * H + i_h) * (num_chunks + 1)
            p_out = p_dstate_logits + (i_split * num_batch + i_b) * H + i_h
            b_after = (o_p > 0) & (b_text_before == text_state)
            b_read = tl.exp(tl.load(p_past_tops + o_slot) - tl.where(b_after, b_lows, float("inf")))
            tl.store(p_out, tl.load(p_out) - tl.load(p_past_totals + o_slot) * tl.sum(b_read * b_lost, axis=0))
