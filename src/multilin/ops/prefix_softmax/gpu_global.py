"""Forward kernels over the whole past: time is cut in parts where texts and heads alone do not fill the card.

Parts but the last are first summed up by one token each, at the price of a second reading of the values; a program then
merges the tokens of the parts before its own and scans its part, chunk by chunk.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

from multilin.ops.kernels.gpu_launch import autotuned
from multilin.ops.kernels.gpu_tiles import dot, narrow
from multilin.ops.prefix_softmax.gpu_math import absorb, finite, inverse, load_row, load_tile, store_tile, text_at

WAYS: list[tuple[dict[str, int], int, int]] = [({}, 4, 3), ({}, 4, 4), ({}, 4, 2), ({}, 8, 3), ({}, 8, 2), ({}, 2, 3)]


@autotuned(WAYS, key=["H", "D", "CHUNK", "BLOCK_D", "PARTS"])
@triton.jit
def summarize(
    p_logits, logits_b, logits_t, logits_h, p_values, values_b, values_t, values_h, p_texts,
    p_part_tops, p_part_totals, p_part_means, T, H, D, part_length, num_parts, num_splits,
    CHUNK: tl.constexpr, BLOCK_D: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Each part's tokens as one: those of the text that the part ends with."""
    i = tl.program_id(0)
    i_split, i_h = i % num_splits, i // num_splits % H
    i_part, i_b = i // (num_splits * H) % num_parts, (i // (num_splits * H * num_parts)).to(tl.int64)
    p_logits += i_b * logits_b + i_h * logits_h
    p_values += i_b * values_b + i_h * values_h
    o_d = i_split * BLOCK_D + tl.arange(0, BLOCK_D)
    m_d = o_d < D
    first = i_part * part_length
    last = tl.minimum(first + part_length, T)
    b_ones = tl.full((CHUNK,), 1.0, tl.float32)
    top, total, b_mean = -float("inf"), 0.0, tl.zeros((BLOCK_D,), tl.float32)
    for start in range(first, last, CHUNK):
        o_t = start + tl.arange(0, CHUNK)
        m_t = o_t < last
        b_logits = load_row(p_logits, o_t, m_t, logits_t, -float("inf"))
        if p_texts is not None:
            b_text = load_row(p_texts + i_b * T, o_t, m_t, 1, -1)
            b_logits = tl.where(b_text == text_at(p_texts + i_b * T, last - 1), b_logits, -float("inf"))
        b_values = load_tile(p_values, o_t, m_t, values_t, o_d, m_d)
        top, total, b_mean = absorb(top, total, b_mean, b_logits, b_ones, b_values)
    o_part = (i_b * num_parts + i_part) * H + i_h
    tl.store(p_part_tops + o_part, top)
    tl.store(p_part_totals + o_part, total)
    tl.store(p_part_means + o_part * D + o_d, b_mean, m_d)


@triton.jit
def before_part(
    p_texts, p_state_logits, p_state_values, p_part_tops, p_part_totals, p_part_means,
    i_b, i_h, i_part, H, D, T, part_length, num_parts, o_d, m_d, PARTS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The token that stands for all before a part: the state and the parts before, of the same text."""
    text = 0
    top, total, b_mean = -float("inf"), 0.0, tl.zeros((BLOCK_D,), tl.float32)
    if p_texts is not None:
        text = text_at(p_texts + i_b * T, i_part * part_length - 1)
    if p_state_logits is not None:
        o_state = i_b * H + i_h
        top = tl.where(text == 0, tl.load(p_state_logits + o_state), -float("inf"))
        total = tl.where(top > -float("inf"), 1.0, 0.0)
        b_mean = total * tl.load(p_state_values + o_state * D + o_d, m_d, 0.0)
    if PARTS > 1:
        o_p = tl.arange(0, PARTS)
        m_p = o_p < i_part
        if p_texts is not None:
            m_p &= tl.load(p_texts + i_b * T + (o_p + 1) * part_length - 1, m_p, -1) == text
        o_part = (i_b * num_parts + o_p) * H + i_h
        b_tops = tl.load(p_part_tops + o_part, m_p, -float("inf"))
        b_totals = tl.load(p_part_totals + o_part, m_p, 0.0)
        b_means = tl.load(p_part_means + o_part[:, None] * D + o_d[None, :], m_p[:, None] & m_d[None, :], 0.0)
        top, total, b_mean = absorb(top, total, b_mean, b_tops, b_totals, b_means)
    return top, total, b_mean


@autotuned(WAYS, key=["H", "D", "CHUNK", "BLOCK_D", "PARTS"])
@triton.jit
def forward(
    p_logits, logits_b, logits_t, logits_h, p_values, values_b, values_t, values_h, p_own, own_b, own_t, own_h,
    p_texts, p_state_logits, p_state_values, p_part_tops, p_part_totals, p_part_means,
    p_means, p_final_logits, p_final_values, p_tops, p_scales, p_past_tops, p_past_totals, p_past_means,
    T, H, D, part_length, num_parts, num_splits, num_chunks, null,
    CHUNK: tl.constexpr, BLOCK_D: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Means of one part, the state after the last one, and what the backward pass reads, where it is asked for."""
    i = tl.program_id(0)
    i_split, i_h = i % num_splits, i // num_splits % H
    i_part, i_b = i // (num_splits * H) % num_parts, (i // (num_splits * H * num_parts)).to(tl.int64)
    p_logits += i_b * logits_b + i_h * logits_h
    p_values += i_b * values_b + i_h * values_h
    p_means += (i_b * T * H + i_h) * D
    o_row, o_chunk = (i_b * H + i_h) * T, (i_b * H + i_h) * (num_chunks + 1)
    o_d = i_split * BLOCK_D + tl.arange(0, BLOCK_D)
    m_d = o_d < D
    first = i_part * part_length
    last = tl.minimum(first + part_length, T)
    b_ones = tl.full((CHUNK,), 1.0, tl.float32)
    top, total, b_mean = before_part(
        p_texts, p_state_logits, p_state_values, p_part_tops, p_part_totals, p_part_means,
        i_b, i_h, i_part, H, D, T, part_length, num_parts, o_d, m_d, PARTS, BLOCK_D,
    )  # fmt: skip
    for start in range(first, last, CHUNK):
        o_t = start + tl.arange(0, CHUNK)
        m_t = o_t < last
        b_logits = load_row(p_logits, o_t, m_t, logits_t, -float("inf"))
        b_values = load_tile(p_values, o_t, m_t, values_t, o_d, m_d)
        visible = o_t[:, None] >= o_t[None, :]
        b_past_top = tl.full((CHUNK,), 0.0, tl.float32) + top
        if p_texts is not None:
            b_text = load_row(p_texts + i_b * T, o_t, m_t, 1, -1)
            visible &= b_text[:, None] == b_text[None, :]
            b_past_top = tl.where(b_text == text_at(p_texts + i_b * T, start - 1), b_past_top, -float("inf"))
        b_scores = tl.where(visible, b_logits[None, :], -float("inf"))
        b_tops = tl.maximum(tl.max(b_scores, axis=1), b_past_top)
        b_own = b_ones - float("inf")
        if p_own is not None:
            b_own = load_row(p_own + i_b * own_b + i_h * own_h, o_t, m_t, own_t, -float("inf"))
            b_tops = tl.maximum(b_tops, b_own)
        b_tops = tl.maximum(b_tops, null)

        b_weights = narrow(tl.exp(b_scores - finite(b_tops)[:, None]), b_values.dtype)
        b_past = total * tl.exp(b_past_top - finite(b_tops))
        b_own = tl.exp(b_own - finite(b_tops))
        b_totals = tl.sum(b_weights.to(tl.float32), axis=1) + b_past + b_own + tl.exp(null - finite(b_tops))
        b_scales = inverse(b_totals)
        b_sums = dot(b_weights, b_values) + b_past[:, None] * b_mean[None, :]
        if p_own is not None:
            b_sums += b_own[:, None] * b_values.to(tl.float32)
        store_tile(p_means, o_t, m_t, H * D, o_d, m_d, b_sums * b_scales[:, None])
        if p_tops is not None:
            o_slot = o_chunk + start // CHUNK
            tl.store(p_past_tops + o_slot, top)
            tl.store(p_past_totals + o_slot, total)
            tl.store(p_past_means + o_slot * D + o_d, b_mean, m_d)
            tl.store(p_tops + o_row + o_t, tl.where(b_scales > 0, b_tops, float("inf")), m_t)
            tl.store(p_scales + o_row + o_t, b_scales, m_t)

        if p_texts is not None:
            text_after = text_at(p_texts + i_b * T, tl.minimum(start + CHUNK, last) - 1)
            b_logits = tl.where(b_text == text_after, b_logits, -float("inf"))
            top = tl.where(text_at(p_texts + i_b * T, start - 1) == text_after, top, -float("inf"))
        top, total, b_mean = absorb(top, total, b_mean, b_logits, b_ones, b_values)
    if i_part == num_parts - 1:
        if p_final_logits is not None:
            o_state = i_b * H + i_h
            log_total = tl.where(total > 0, top + tl.log(tl.where(total > 0, total, 1.0)), -float("inf"))
            tl.store(p_final_logits + o_state, log_total)
            tl.store(p_final_values + o_state * D + o_d, b_mean, m_d)
        if p_tops is not None:
            o_slot = o_chunk + num_chunks
            tl.store(p_past_tops + o_slot, top)
            tl.store(p_past_totals + o_slot, total)
            tl.store(p_past_means + o_slot * D + o_d, b_mean, m_d)
