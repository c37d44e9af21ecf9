"""Backward kernel with a window: the forward kernel's mirror image.

What reads token j is the rest of its own block, and of the next block the rows before j + window: two triangles per
chunk, and beyond them two rows, one for the later chunks of the own block, one for the earlier chunks of the next.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

from multilin.ops.kernels.gpu_launch import autotuned
from multilin.ops.kernels.gpu_tiles import dot, narrow
from multilin.ops.prefix_softmax.gpu_global import WAYS
from multilin.ops.prefix_softmax.gpu_math import absorb_rows, load_row, load_tile, store_tile, text_at


@triton.jit
def sum_up_next_block(
    p_dmeans, dmeans_t, p_text, p_tops, p_scales, p_deltas, p_early_lows, p_early_flows, p_early_lost,
    first, last, num_chunks, D, o_d, m_d, has_texts: tl.constexpr, CHUNK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """For each chunk of the next block, from `first` to `last`: one row for the rows before it, of the first text."""
    low, b_flow, lost = float("inf"), tl.zeros((BLOCK_D,), tl.float32), 0.0
    for i_chunk in range(0, num_chunks):
        tl.store(p_early_lows + i_chunk, low)
        tl.store(p_early_lost + i_chunk, lost)
        tl.store(p_early_flows + i_chunk * D + o_d, b_flow, m_d)
        o_t = first + i_chunk * CHUNK + tl.arange(0, CHUNK)
        m_t = o_t < last
        b_tops = load_row(p_tops, o_t, m_t, 1, float("inf"))
        if has_texts:
            b_text = load_row(p_text, o_t, m_t, 1, -1)
            b_tops = tl.where(b_text == text_at(p_text, tl.minimum(first, last) - 1), b_tops, float("inf"))
        b_scales, b_deltas = load_row(p_scales, o_t, m_t, 1, 0.0), load_row(p_deltas, o_t, m_t, 1, 0.0)
        b_dmeans = load_tile(p_dmeans, o_t, m_t, dmeans_t, o_d, m_d)
        low, b_flow, lost = absorb_rows(low, b_flow, lost, b_tops, b_scales, b_dmeans, b_deltas)


@triton.jit
def shares(b_logits, visible, b_tops, b_scales):
    """Weight of each token (columns) in the mean of each row."""
    b_scores = tl.where(visible, b_logits[None, :], -float("inf"))
    return tl.exp(b_scores - b_tops[:, None]) * b_scales[:, None]


@autotuned(WAYS, key=["H", "D", "CHUNK", "BLOCK_D", "HAS_CARRY"])
@triton.jit
def backward(
    p_logits, logits_b, logits_t, logits_h, p_values, values_b, values_t, values_h, p_own, own_b, own_t, own_h,
    p_texts, p_dmeans, dmeans_b, dmeans_t, dmeans_h, p_early_lows, p_early_flows, p_early_lost,
    p_tops, p_scales, p_deltas, p_dvalues, p_dlogits, p_down,
    T, H, D, window, length, num_blocks, num_splits, num_chunks, num_batch,
    CHUNK: tl.constexpr, BLOCK_D: tl.constexpr, HAS_CARRY: tl.constexpr,
):  # fmt: skip
    """Gradients of the tokens of one block."""
    i = tl.program_id(0)
    i_split, i_h = i % num_splits, i // num_splits % H
    i_block, i_b = i // (num_splits * H) % num_blocks, (i // (num_splits * H * num_blocks)).to(tl.int64)
    p_logits += i_b * logits_b + i_h * logits_h
    p_values += i_b * values_b + i_h * values_h
    p_dmeans += i_b * dmeans_b + i_h * dmeans_h
    p_text = p_logits
    if p_texts is not None:
        p_text = p_texts + i_b * T
    o_row = (i_b * H + i_h) * T
    p_tops += o_row
    p_scales += o_row
    p_deltas += ((i_split * num_batch + i_b) * H + i_h) * T
    o_out = ((i_split * num_batch + i_b) * T) * H + i_h
    o_d = i_split * BLOCK_D + tl.arange(0, BLOCK_D)
    m_d = o_d < D
    first = i_block * length
    last = tl.minimum(first + length, T)
    has_texts: tl.constexpr = p_texts is not None
    low, b_flow, lost = float("inf"), tl.zeros((BLOCK_D,), tl.float32), 0.0
    if HAS_CARRY:
        o_early = (((i_split * num_batch + i_b) * H + i_h) * num_blocks + i_block) * num_chunks
        p_early_lows += o_early
        p_early_lost += o_early
        p_early_flows += o_early * D
        sum_up_next_block(
            p_dmeans, dmeans_t, p_text, p_tops, p_scales, p_deltas, p_early_lows, p_early_flows, p_early_lost,
            first + length, tl.minimum(first + 2 * length, T), num_chunks, D, o_d, m_d,
            has_texts, CHUNK, BLOCK_D,
        )  # fmt: skip
        tl.debug_barrier()
    for i_back in range(0, tl.cdiv(last - first, CHUNK)):
        i_chunk = tl.cdiv(last - first, CHUNK) - 1 - i_back
        start = first + i_chunk * CHUNK
        o_t = start + tl.arange(0, CHUNK)
        o_next = o_t + length
        m_t, m_next = o_t < last, o_next < tl.minimum(T, first + 2 * length)
        b_logits = load_row(p_logits, o_t, m_t, logits_t, -float("inf"))
        b_values = load_tile(p_values, o_t, m_t, values_t, o_d, m_d)
        b_dmeans = load_tile(p_dmeans, o_t, m_t, dmeans_t, o_d, m_d)
        b_next_dmeans = load_tile(p_dmeans, o_next, m_next, dmeans_t, o_d, m_d)
        b_tops, b_scales = load_row(p_tops, o_t, m_t, 1, float("inf")), load_row(p_scales, o_t, m_t, 1, 0.0)
        b_next_tops = load_row(p_tops, o_next, m_next, 1, float("inf"))
        b_next_scales = load_row(p_scales, o_next, m_next, 1, 0.0)
        b_deltas = load_row(p_deltas, o_t, m_t, 1, 0.0)
        b_next_deltas = load_row(p_deltas, o_next, m_next, 1, 0.0)
        distance = o_t[:, None] - o_t[None, :]
        visible = (distance >= 0) & (distance < window)
        next_visible = distance + length < window
        if has_texts:
            b_text = load_row(p_text, o_t, m_t, 1, -1)
            visible &= b_text[:, None] == b_text[None, :]
            next_visible &= load_row(p_text, o_next, m_next, 1, -2)[:, None] == b_text[None, :]
        b_shares = narrow(shares(b_logits, visible, b_tops, b_scales), b_values.dtype)
        b_next_shares = narrow(shares(b_logits, next_visible, b_next_tops, b_next_scales), b_values.dtype)
        b_dvalues = dot(tl.trans(b_shares), b_dmeans) + dot(tl.trans(b_next_shares), b_next_dmeans)
        b_lost = tl.sum(b_shares.to(tl.float32) * b_deltas[:, None], axis=0)
        b_lost += tl.sum(b_next_shares.to(tl.float32) * b_next_deltas[:, None], axis=0)
        b_before_tops = b_tops
        if HAS_CARRY:
            early_low, early_lost = tl.load(p_early_lows + i_chunk), tl.load(p_early_lost + i_chunk)
            b_early_flow = tl.load(p_early_flows + i_chunk * D + o_d, m_d, 0.0)
            b_late_logits, b_early_logits = b_logits, b_logits
            if has_texts:
                text_before, text_after = (
                    text_at(p_text, start - 1),
                    text_at(p_text, tl.minimum(start + CHUNK, last) - 1),
                )
                b_late_logits = tl.where(b_text == text_after, b_logits, -float("inf"))
                b_early_logits = tl.where(b_text == text_at(p_text, last - 1), b_logits, -float("inf"))
                b_before_tops = tl.where(b_text == text_before, b_tops, float("inf"))
            b_read, b_early_read = tl.exp(b_late_logits - low), tl.exp(b_early_logits - early_low)
            b_dvalues += b_read[:, None] * b_flow[None, :] + b_early_read[:, None] * b_early_flow[None, :]
            b_lost += b_read * lost + b_early_read * early_lost
            if has_texts:
                low = tl.where(text_before == text_after, low, float("inf"))
            low, b_flow, lost = absorb_rows(low, b_flow, lost, b_before_tops, b_scales, b_dmeans, b_deltas)
        b_wide_values, b_wide_dmeans = b_values.to(tl.float32), b_dmeans.to(tl.float32)
        b_dlogits = tl.sum(b_wide_values * b_dvalues, axis=1) - b_lost
        tl.store(p_dlogits + o_out + o_t.to(tl.int64) * H, b_dlogits, m_t)
        if p_own is not None:
            b_own = load_row(p_own + i_b * own_b + i_h * own_h, o_t, m_t, own_t, -float("inf"))
            b_own = tl.exp(b_own - b_tops) * b_scales
            b_down = b_own * (tl.sum(b_wide_dmeans * b_wide_values, axis=1) - b_deltas)
            tl.store(p_down + o_out + o_t.to(tl.int64) * H, b_down, m_t)
            b_dvalues += b_own[:, None] * b_wide_dmeans
        store_tile(p_dvalues + (i_b * T * H + i_h) * D, o_t, m_t, H * D, o_d, m_d, b_dvalues)
