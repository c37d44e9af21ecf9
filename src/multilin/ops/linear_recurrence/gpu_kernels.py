"""Triton kernels of the recurrence of minGRU, for some channels of a part of the time of one text.

With c = g(u), z = sigmoid(k), q = 1 - z = sigmoid(-k), and f = q, but 0 where a text begins:

    h_t = f_t h_(t-1) + z_t c_t        s_t = f_(t+1) s_(t+1) + dh_t        dk_t = s_t (c_t - h_(t-1)) z_t q_t

and du_t = s_t z_t g'(u_t), where h_(t-1) counts as 0 where a text begins. Both h and s take steps x -> f x + term, and
two such steps combine into one. So a parallel prefix scan combines the steps of a chunk, chunks are processed in order,
and `summarize` combines a part of the time into one step. z, q and c are computed again from the inputs, which costs
less than reading them.
"""

import triton
import triton.language as tl

from multilin.ops.kernels.gpu_launch import autotuned
from multilin.ops.kernels.gpu_tiles import load_tile, store_tile

WAYS: list[tuple[dict[str, int], int, int]] = [({}, 4, 1), ({}, 1, 1), ({}, 2, 1), ({}, 8, 1)]
KEY = ("D", "CHUNK")


@triton.jit
def compose(factor, term, later_factor, later_term):
    """Combine two steps into one."""
    return later_factor * factor, later_factor * term + later_term


@triton.jit
def place(D, BLOCK: tl.constexpr):
    """The channels, the part of the time, and the text that this program computes."""
    num_blocks = tl.cdiv(D, BLOCK)
    i = tl.program_id(0)
    return i % num_blocks * BLOCK + tl.arange(0, BLOCK), tl.program_id(1), (i // num_blocks).to(tl.int64)


@triton.jit
def load_shares(p_inputs, o_t, m_t, o_d, m_d, D):
    """z = sigmoid(k) and q = sigmoid(-k), both to full precision; 0 and 1 where there is no token."""
    k = load_tile(p_inputs, o_t, m_t, 2 * D, o_d, m_d).to(tl.float32)
    k = tl.where(m_t[:, None], k, -float("inf"))
    decay = tl.exp(-tl.abs(k))
    larger = 1.0 / (1.0 + decay)
    smaller = decay * larger
    return tl.where(k >= 0, larger, smaller), tl.where(k >= 0, smaller, larger)


@triton.jit
def begins(p_starts, o_t, T):
    """Whether a text begins at these positions, as a column."""
    if p_starts is None:
        return (o_t < 0)[:, None]
    else:
        return (tl.load(p_starts + o_t, mask=o_t < T, other=0) != 0)[:, None]


@triton.jit
def load_candidates(p_inputs, o_t, m_t, o_d, m_d, D):
    """u, and c = u + 0.5 where it is not negative, else sigmoid(u)."""
    u = load_tile(p_inputs + D, o_t, m_t, 2 * D, o_d, m_d).to(tl.float32)
    growth = tl.exp(tl.minimum(u, 0.0))
    return u, tl.where(u >= 0, u + 0.5, growth / (1.0 + growth))


@triton.jit
def load_steps(p_inputs, p_starts, p_dhidden, o_t, o_d, T, D, BACKWARD: tl.constexpr):
    """f and the term of each step x -> f x + term; steps go to later positions or, backward, to earlier positions."""
    m_t, m_d = o_t < T, o_d < D
    if BACKWARD:
        _, q = load_shares(p_inputs, o_t + 1, o_t + 1 < T, o_d, m_d, D)
        term = load_tile(p_dhidden, o_t, m_t, D, o_d, m_d).to(tl.float32)
        return tl.where(begins(p_starts, o_t + 1, T), 0.0, q), term
    else:
        z, q = load_shares(p_inputs, o_t, m_t, o_d, m_d, D)
        _, c = load_candidates(p_inputs, o_t, m_t, o_d, m_d, D)
        return tl.where(begins(p_starts, o_t, T), 0.0, q), z * c


@triton.jit
def row_of(b_x, row, CHUNK: tl.constexpr):
    """One row of a tile."""
    return tl.sum(tl.where((tl.arange(0, CHUNK) == row)[:, None], b_x, 0.0), axis=0)


@autotuned(WAYS, (*KEY, "BACKWARD"))
@triton.jit
def summarize(
    p_inputs, p_starts, p_dhidden, p_products, p_ends, T, D, length,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """Combine a part of the time into one step: its factor and its term."""
    o_d, i_part, i_b = place(D, BLOCK)
    p_inputs += i_b * T * 2 * D
    p_dhidden = None if p_dhidden is None else p_dhidden + i_b * T * D
    p_starts = None if p_starts is None else p_starts + i_b * T
    product, end = tl.full((BLOCK,), 1.0, tl.float32), tl.zeros((BLOCK,), tl.float32)
    num_chunks = tl.cdiv(tl.minimum(length, T - i_part * length), CHUNK)
    for i in range(num_chunks):
        i_chunk = num_chunks - 1 - i if BACKWARD else i
        o_t = i_part * length + i_chunk * CHUNK + tl.arange(0, CHUNK)
        steps = load_steps(p_inputs, p_starts, p_dhidden, o_t, o_d, T, D, BACKWARD)
        b_factors, b_terms = tl.associative_scan(steps, 0, compose, reverse=BACKWARD)
        last = 0 if BACKWARD else CHUNK - 1
        product, end = compose(product, end, row_of(b_factors, last, CHUNK), row_of(b_terms, last, CHUNK))
    o_sum = (i_b * tl.num_programs(1) + i_part) * D + o_d
    tl.store(p_products + o_sum, product, mask=o_d < D)
    tl.store(p_ends + o_sum, end, mask=o_d < D)


@triton.jit
def state_after_parts(x, p_products, p_ends, i_b, first, num_parts, stride, D, o_d):
    """x after the steps of `num_parts` parts, beginning with part `first`; `stride` is 1, or -1 for backward."""
    for i in range(num_parts):
        o_sum = (i_b * tl.num_programs(1) + first + i * stride) * D + o_d
        x = tl.load(p_products + o_sum, mask=o_d < D, other=0.0) * x + tl.load(p_ends + o_sum, mask=o_d < D, other=0.0)
    return x


@autotuned(WAYS, KEY)
@triton.jit
def forward(
    p_inputs, p_starts, p_products, p_ends, p_before, p_hidden, p_after, T, D, length,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the hidden states, and the last hidden state."""
    o_d, i_part, i_b = place(D, BLOCK)
    p_inputs, p_hidden = p_inputs + i_b * T * 2 * D, p_hidden + i_b * T * D
    p_starts = None if p_starts is None else p_starts + i_b * T
    h = tl.load(p_before + i_b * D + o_d, mask=o_d < D, other=0.0)
    if p_products is not None:
        h = state_after_parts(h, p_products, p_ends, i_b, 0, i_part, 1, D, o_d)
    first = i_part * length
    for start in range(first, tl.minimum(first + length, T), CHUNK):
        o_t = start + tl.arange(0, CHUNK)
        steps = load_steps(p_inputs, p_starts, None, o_t, o_d, T, D, False)
        b_factors, b_terms = tl.associative_scan(steps, 0, compose)
        b_hidden = b_factors * h[None, :] + b_terms
        store_tile(p_hidden, o_t, o_t < T, D, o_d, o_d < D, b_hidden)
        h = row_of(b_hidden, CHUNK - 1, CHUNK)
    if i_part == tl.num_programs(1) - 1:
        tl.store(p_after + i_b * D + o_d, h, mask=o_d < D)


@autotuned(WAYS, KEY)
@triton.jit
def backward(
    p_inputs, p_starts, p_products, p_ends, p_dhidden, p_before, p_hidden, p_dafter, p_dinputs, p_dbefore, T, D,
    length, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradients of inputs and of h before them."""
    o_d, i_part, i_b = place(D, BLOCK)
    p_inputs, p_dinputs = p_inputs + i_b * T * 2 * D, p_dinputs + i_b * T * 2 * D
    p_hidden, p_dhidden = p_hidden + i_b * T * D, p_dhidden + i_b * T * D
    p_starts = None if p_starts is None else p_starts + i_b * T
    m_d = o_d < D
    before = tl.load(p_before + i_b * D + o_d, mask=o_d < D, other=0.0)
    s = tl.load(p_dafter + i_b * D + o_d, mask=o_d < D, other=0.0)
    if p_products is not None:
        num_parts = tl.num_programs(1)
        s = state_after_parts(s, p_products, p_ends, i_b, num_parts - 1, num_parts - 1 - i_part, -1, D, o_d)
    num_chunks = tl.cdiv(tl.minimum(length, T - i_part * length), CHUNK)
    for i in range(num_chunks):
        o_t = i_part * length + (num_chunks - 1 - i) * CHUNK + tl.arange(0, CHUNK)
        m_t = o_t < T
        steps = load_steps(p_inputs, p_starts, p_dhidden, o_t, o_d, T, D, True)
        b_factors, b_terms = tl.associative_scan(steps, 0, compose, reverse=True)
        b_s = b_factors * s[None, :] + b_terms
        z, q = load_shares(p_inputs, o_t, m_t, o_d, m_d, D)
        u, c = load_candidates(p_inputs, o_t, m_t, o_d, m_d, D)
        b_h = load_tile(p_hidden, o_t - 1, m_t & (o_t > 0), D, o_d, m_d).to(tl.float32)
        b_h = tl.where((o_t == 0)[:, None], before[None, :], b_h)
        b_h = tl.where(begins(p_starts, o_t, T), 0.0, b_h)
        b_du = b_s * z * tl.where(u >= 0, 1.0, c * (1.0 - c))
        store_tile(p_dinputs, o_t, m_t, 2 * D, o_d, m_d, b_s * (c - b_h) * z * q)
        store_tile(p_dinputs + D, o_t, m_t, 2 * D, o_d, m_d, b_du)
        s = row_of(b_s, 0, CHUNK)
    if i_part == 0:
        o_first = tl.zeros((1,), tl.int32)
        _, q = load_shares(p_inputs, o_first, o_first < T, o_d, m_d, D)
        f = tl.where(begins(p_starts, o_first, T), 0.0, q)
        tl.store(p_dbefore + i_b * D + o_d, tl.sum(f, axis=0) * s, mask=o_d < D)
