"""One position of each text: a single kernel reads the state, writes the mean and the state after it."""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

from multilin.ops.kernels.gpu_tiles import store_rounded
from multilin.ops.prefix_softmax.gpu_math import absorb, finite, inverse


@triton.jit
def gated(top, total, b_mean, own, b_value, null):
    """The mean of all that was read and, once more, of the own value and of a token of value 0."""
    all_top = tl.maximum(tl.maximum(top, own), null)
    past, own = total * tl.exp(top - finite(all_top)), tl.exp(own - finite(all_top))
    all_total = past + own + tl.exp(null - finite(all_top))
    return (past * b_mean + own * b_value) * inverse(all_total)


@triton.jit
def step(
    p_logits, logits_b, logits_h, p_values, values_b, values_h, p_own, own_b, own_h, p_starts,
    p_state_logits, p_state_values, p_means, p_final_logits, p_final_values, H, D, null, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Over the whole past: the state is one token."""
    i_h, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_state = i_b * H + i_h
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < D
    top = tl.load(p_logits + i_b * logits_b + i_h * logits_h)
    b_value = tl.load(p_values + i_b * values_b + i_h * values_h + o_d, m_d, 0.0).to(tl.float32)
    total, b_mean = tl.where(top > -float("inf"), 1.0, 0.0), b_value
    if p_state_logits is not None:
        past_top = tl.load(p_state_logits + o_state)
        if p_starts is not None:
            past_top = tl.where(tl.load(p_starts + i_b) != 0, -float("inf"), past_top)
        b_past = tl.load(p_state_values + o_state * D + o_d, m_d, 0.0)
        new_top = tl.maximum(top, past_top)
        past, new = tl.exp(past_top - finite(new_top)), tl.exp(top - finite(new_top))
        top, total = new_top, past + new
        b_mean = (past * b_past + new * b_value) * inverse(total)
    b_mean = tl.where(total > 0, b_mean, 0.0)
    if p_final_logits is not None:
        tl.store(p_final_logits + o_state, top + tl.log(tl.where(total > 0, total, 1.0)))
        tl.store(p_final_values + o_state * D + o_d, b_mean, m_d)
    own = -float("inf")
    if p_own is not None:
        own = tl.load(p_own + i_b * own_b + i_h * own_h)
    b_mean = gated(top, total, b_mean, own, b_value, null)
    store_rounded(p_means + o_state * D + o_d, b_mean, m_d)


@triton.jit
def step_window(
    p_logits, logits_b, logits_h, p_values, values_b, values_h, p_own, own_b, own_h, p_starts,
    p_state_logits, p_state_values, p_means, p_final_logits, p_final_values, H, D, num_past, null,
    CHUNK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """With a window: the state's tokens are read and move up by one place."""
    i_h, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < D
    b_ones = tl.full((CHUNK,), 1.0, tl.float32)
    logit = tl.load(p_logits + i_b * logits_b + i_h * logits_h)
    b_value = tl.load(p_values + i_b * values_b + i_h * values_h + o_d, m_d, 0.0).to(tl.float32)
    top, total, b_mean = logit, tl.where(logit > -float("inf"), 1.0, 0.0), b_value
    b_mean = tl.where(total > 0, b_mean, 0.0)
    for start in range(0, num_past, CHUNK):
        o_s = start + tl.arange(0, CHUNK)
        m_s = o_s < num_past
        o_state = (i_b * num_past + o_s) * H + i_h
        b_logits = tl.load(p_state_logits + o_state, m_s, -float("inf"))
        if p_starts is not None:
            b_logits = tl.where(tl.load(p_starts + i_b) != 0, -float("inf"), b_logits)
        b_values = tl.load(p_state_values + o_state[:, None] * D + o_d[None, :], m_s[:, None] & m_d[None, :], 0.0)
        top, total, b_mean = absorb(top, total, b_mean, b_logits, b_ones, b_values)
        if p_final_logits is not None:
            m_moved = m_s & (o_s > 0)
            tl.store(p_final_logits + o_state - H, b_logits, m_moved)
            tl.store(
                p_final_values + (o_state - H)[:, None] * D + o_d[None, :], b_values, m_moved[:, None] & m_d[None, :]
            )
    if p_final_logits is not None:
        if num_past > 0:
            o_state = (i_b * num_past + num_past - 1) * H + i_h
            tl.store(p_final_logits + o_state, logit)
            tl.store(p_final_values + o_state * D + o_d, b_value, m_d)
    own = -float("inf")
    if p_own is not None:
        own = tl.load(p_own + i_b * own_b + i_h * own_h)
    b_mean = gated(top, total, b_mean, own, b_value, null)
    store_rounded(p_means + (i_b * H + i_h) * D + o_d, b_mean, m_d)
