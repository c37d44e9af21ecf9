"""Steps on tiles that the GPU kernels of the running softmax mean share, and their formulas.

One token summarises all tokens read so far: the largest logit `top`, the `total` of exp(logit - top), and the `mean`.
Inside a chunk, the weights exp(l_j - M_t) of token j at position (row) t form a matrix, which tensor cores multiply by
the values. M_t is the largest logit that row t reads, so all weights are in [0, 1]. A row's total adds the weights as
rounded for this product, so that the weights of a mean add up to exactly 1.

Backward, let D_t be a row's total, p_tj = exp(l_j - M_t) / D_t, delta_t = dy_t . y_t. Over the rows t that read j, dv_j
is the sum of p_tj dy_t, and dl_j = v_j . dv_j - the sum of p_tj delta_t. One row summarises all rows after a chunk:
`low` is the smallest M_t, `flow` the sum of exp(low - M_t) / D_t dy_t, and `lost` the same sum of delta_t. Multiplied
by exp(l_j - low), `flow` and `lost` are the sums with p_tj. A row reads no logit above its M_t, so this factor is in
[0, 1], too.
"""

import triton
import triton.language as tl

from multilin.ops.kernels.gpu_tiles import finite, inverse, load_row

TOKENS = tl.constexpr(32)  # summaries of parts that are merged at a time
UNSPECIALIZED = ("cut", "num_slots", "window")  # else Triton compiles a kernel per divisibility of these numbers


@triton.jit
def place(T, H, D, cut, BLOCK_D: tl.constexpr):
    """The slice of D, head, part of the time and text of this program; the part's bounds; the components and their
    mask."""
    i, num_parts, num_splits = tl.program_id(0), cut.parts, cut.splits
    i_split, i_h, i_part = i % num_splits, i // num_splits % H, i // (num_splits * H) % num_parts
    first, o_d = i_part * cut.length, i_split * BLOCK_D + tl.arange(0, BLOCK_D)
    i_b = (i // (num_splits * H * num_parts)).to(tl.int64)
    return i_split, i_h, i_part, i_b, first, tl.minimum(first + cut.length, T), o_d, o_d < D


@triton.jit
def store_token(tokens, i, D, o_d, m_d, top, total, b_mean):
    """Store a summary token as element i of (tops, totals, means)."""
    tl.store(tokens[0] + i, top)
    tl.store(tokens[1] + i, total)
    tl.store(tokens[2] + i * D + o_d, b_mean, m_d)


@triton.jit
def absorb(top, total, b_mean, b_logits, b_totals, b_values):
    """Merge one token with the tokens of a tile; a token with total n weighs as much as n tokens of its logit."""
    new_top = tl.maximum(top, tl.max(b_logits, axis=0))
    b_weights = b_totals * tl.exp(b_logits - finite(new_top))
    past = total * tl.exp(top - finite(new_top))
    new_total = past + tl.sum(b_weights, axis=0)
    b_sum = past * b_mean + tl.sum(b_weights[:, None] * b_values.to(tl.float32), axis=0)
    return new_top, new_total, b_sum * inverse(new_total)


@triton.jit
def top_and_total(log_total):
    """Split the float64 log of a total: a float32 `top`, and a `total` near 1 that makes up for the rounding."""
    top = log_total.to(tl.float32)
    return top, tl.exp((log_total - finite(top)).to(tl.float32))


@triton.jit
def log_of(top, total):
    """The log of a total weight, in float64; -inf for no weight."""
    wide = top.to(tl.float64) + tl.log(tl.where(total > 0, total, 1.0).to(tl.float64))
    return tl.where(total > 0, wide, -float("inf"))


@triton.jit
def absorb_rows(low, b_flow, lost, b_tops, b_scales, b_dmeans, b_deltas):
    """Merge one row with the rows of a tile; `b_scales` are 1 / D_t (see above)."""
    new_low = tl.minimum(low, tl.min(b_tops, axis=0))
    b_shares = b_scales * tl.exp(finite(new_low) - b_tops)
    kept = tl.exp(finite(new_low) - low)
    b_flow = kept * b_flow + tl.sum(b_shares[:, None] * b_dmeans.to(tl.float32), axis=0)
    return new_low, b_flow, kept * lost + tl.sum(b_shares * b_deltas, axis=0)


@triton.jit
def text_at(p_text, position):
    """The number of the text at a position; 0 before the first position, and everywhere if there is only one text."""
    text = 0
    if p_text is not None:
        text = tl.load(p_text + position, mask=position >= 0, other=0)
    return text


@triton.jit
def load_texts(p_text, o_t, m_t):
    """Load the numbers of the texts at these positions, -1 outside; 0 everywhere if there is only one text."""
    if p_text is None:
        return tl.zeros_like(o_t)  # a function in Triton 3.6 cannot return None
    else:
        return load_row(p_text, o_t, m_t, 1, -1)


@triton.jit
def of_text(b_numbers, b_text, text, other):
    """Replace the numbers at positions that belong to other texts with `other`."""
    return tl.where(b_text == text, b_numbers, other)
