"""Forward kernel with a window: linear in time whatever the window (van Herk, Gil-Werman).

Time is cut in blocks as long as the window, and a program takes one block of one head. What row t reads is its own
block up to t, and of the block before the tokens after t - window: two triangles of weights per chunk, and beyond them
two tokens, one for the chunks before in the own block, one for the later chunks of the block before. Those of the
second kind are found first, from the last chunk of the block before to its second. Windows up to a chunk need only the
triangles.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

from multilin.ops.kernels.gpu_launch import autotuned
from multilin.ops.kernels.gpu_tiles import dot, narrow
from multilin.ops.prefix_softmax.gpu_global import WAYS
from multilin.ops.prefix_softmax.gpu_math import absorb, finite, inverse, load_row, load_tile, store_tile, text_at


@triton.jit
def sum_up_block_before(
    p_logits, logits_t, p_values, values_t, p_text, p_late_tops, p_late_totals, p_late_means,
    first, length, num_chunks, D, o_d, m_d, has_texts: tl.constexpr, CHUNK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """For each chunk of the block before: one token for the block's tokens behind that chunk, of its last text."""
    top, total, b_mean = -float("inf"), 0.0, tl.zeros((BLOCK_D,), tl.float32)
    for i_back in range(0, num_chunks):
        i_chunk = num_chunks - 1 - i_back
        tl.store(p_late_tops + i_chunk, top)
        tl.store(p_late_totals + i_chunk, total)
        tl.store(p_late_means + i_chunk * D + o_d, b_mean, m_d)
        if i_chunk > 0:
            o_t = first - length + i_chunk * CHUNK + tl.arange(0, CHUNK)
            m_t = (o_t >= 0) & (o_t < first)
            b_logits = load_row(p_logits, o_t, m_t, logits_t, -float("inf"))
            if has_texts:
                b_text = load_row(p_text, o_t, m_t, 1, -1)
                b_logits = tl.where(b_text == text_at(p_text, first - 1), b_logits, -float("inf"))
            b_values = load_tile(p_values, o_t, m_t, values_t, o_d, m_d)
            b_ones = tl.full((CHUNK,), 1.0, tl.float32)
            top, total, b_mean = absorb(top, total, b_mean, b_logits, b_ones, b_values)


@autotuned(WAYS, key=["H", "D", "CHUNK", "BLOCK_D", "HAS_CARRY"])
@triton.jit
def forward(
    p_logits, logits_b, logits_t, logits_h, p_values, values_b, values_t, values_h, p_own, own_b, own_t, own_h,
    p_texts, p_dmeans, dmeans_b, dmeans_t, dmeans_h, p_late_tops, p_late_totals, p_late_means,
    p_means, p_tops, p_scales, p_deltas,
    T, H, D, window, length, num_blocks, num_splits, num_chunks, num_batch, null,
    CHUNK: tl.constexpr, BLOCK_D: tl.constexpr, HAS_CARRY: tl.constexpr,
):  # fmt: skip
    """Means of one block; or, given dy instead, the products dy_t . y_t."""
    i = tl.program_id(0)
    i_split, i_h = i % num_splits, i // num_splits % H
    i_block, i_b = i // (num_splits * H) % num_blocks, (i // (num_splits * H * num_blocks)).to(tl.int64)
    p_logits += i_b * logits_b + i_h * logits_h
    p_values += i_b * values_b + i_h * values_h
    p_text = p_logits
    if p_texts is not None:
        p_text = p_texts + i_b * T
    o_row = (i_b * H + i_h) * T
    o_d = i_split * BLOCK_D + tl.arange(0, BLOCK_D)
    m_d = o_d < D
    first = i_block * length
    last = tl.minimum(first + length, T)
    has_texts: tl.constexpr = p_texts is not None
    b_ones = tl.full((CHUNK,), 1.0, tl.float32)
    top, total, b_mean = -float("inf"), 0.0, tl.zeros((BLOCK_D,), tl.float32)
    if HAS_CARRY:
        o_late = (((i_split * num_batch + i_b) * H + i_h) * num_blocks + i_block) * num_chunks
        p_late_tops += o_late
        p_late_totals += o_late
        p_late_means += o_late * D
        sum_up_block_before(
            p_logits, logits_t, p_values, values_t, p_text, p_late_tops, p_late_totals, p_late_means,
            first, length, num_chunks, D, o_d, m_d, has_texts, CHUNK, BLOCK_D,
        )  # fmt: skip
        tl.debug_barrier()
    for start in range(first, last, CHUNK):
        o_t = start + tl.arange(0, CHUNK)
        o_old = o_t - length
        m_t, m_old = o_t < last, (o_old >= 0) & (o_old < first)
        b_logits = load_row(p_logits, o_t, m_t, logits_t, -float("inf"))
        b_values = load_tile(p_values, o_t, m_t, values_t, o_d, m_d)
        b_old_logits = load_row(p_logits, o_old, m_old, logits_t, -float("inf"))
        b_old_values = load_tile(p_values, o_old, m_old, values_t, o_d, m_d)
        distance = o_t[:, None] - o_t[None, :]
        visible = (distance >= 0) & (distance < window)
        old_visible = distance + length < window
        if has_texts:
            b_text = load_row(p_text, o_t, m_t, 1, -1)
            visible &= b_text[:, None] == b_text[None, :]
            old_visible &= b_text[:, None] == load_row(p_text, o_old, m_old, 1, -1)[None, :]
        b_scores = tl.where(visible, b_logits[None, :], -float("inf"))
        b_old_scores = tl.where(old_visible, b_old_logits[None, :], -float("inf"))
        b_tops = tl.maximum(tl.max(b_scores, axis=1), tl.max(b_old_scores, axis=1))
        b_own = b_ones - float("inf")
        if p_own is not None:
            b_own = load_row(p_own + i_b * own_b + i_h * own_h, o_t, m_t, own_t, -float("inf"))
            b_tops = tl.maximum(b_tops, b_own)
        b_tops = tl.maximum(b_tops, null)
        if HAS_CARRY:
            i_late = (start - first) // CHUNK
            late_top, late_total = tl.load(p_late_tops + i_late), tl.load(p_late_totals + i_late)
            b_late_mean = tl.load(p_late_means + i_late * D + o_d, m_d, 0.0)
            b_late_top, b_past_top = b_ones * 0.0 + late_top, b_ones * 0.0 + top
            if has_texts:
                b_late_top = tl.where(b_text == text_at(p_text, first - 1), b_late_top, -float("inf"))
                b_past_top = tl.where(b_text == text_at(p_text, start - 1), b_past_top, -float("inf"))
            b_tops = tl.maximum(tl.maximum(b_late_top, b_past_top), b_tops)

        b_shift = finite(b_tops)
        b_weights = narrow(tl.exp(b_scores - b_shift[:, None]), b_values.dtype)
        b_old_weights = narrow(tl.exp(b_old_scores - b_shift[:, None]), b_values.dtype)
        b_own = tl.exp(b_own - b_shift)
        b_totals = tl.sum(b_weights.to(tl.float32), axis=1) + tl.sum(b_old_weights.to(tl.float32), axis=1)
        b_totals += b_own + tl.exp(null - b_shift)
        b_sums = dot(b_weights, b_values) + dot(b_old_weights, b_old_values)
        if HAS_CARRY:
            b_past, b_late = total * tl.exp(b_past_top - b_shift), late_total * tl.exp(b_late_top - b_shift)
            b_totals += b_past + b_late
            b_sums += b_past[:, None] * b_mean[None, :] + b_late[:, None] * b_late_mean[None, :]
        if p_own is not None:
            b_sums += b_own[:, None] * b_values.to(tl.float32)
        b_scales = inverse(b_totals)
        b_means = b_sums * b_scales[:, None]
        if p_means is not None:
            store_tile(p_means + (i_b * T * H + i_h) * D, o_t, m_t, H * D, o_d, m_d, b_means)
        if p_tops is not None:
            tl.store(p_tops + o_row + o_t, tl.where(b_scales > 0, b_tops, float("inf")), m_t)
            tl.store(p_scales + o_row + o_t, b_scales, m_t)
        if p_dmeans is not None:
            b_dmeans = load_tile(p_dmeans + i_b * dmeans_b + i_h * dmeans_h, o_t, m_t, dmeans_t, o_d, m_d)
            b_deltas = tl.sum(b_means * b_dmeans.to(tl.float32), axis=1)
            tl.store(p_deltas + ((i_split * num_batch + i_b) * H + i_h) * T + o_t, b_deltas, m_t)

        if HAS_CARRY:
            if has_texts:
                text_after = text_at(p_text, tl.minimum(start + CHUNK, last) - 1)
                b_logits = tl.where(b_text == text_after, b_logits, -float("inf"))
                top = tl.where(text_at(p_text, start - 1) == text_after, top, -float("inf"))
            top, total, b_mean = absorb(top, total, b_mean, b_logits, b_ones, b_values)
