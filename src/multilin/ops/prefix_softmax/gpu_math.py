"""What the GPU kernels of the running softmax mean do to tiles; the formulas behind them.

All tokens read so far are one token: a running maximum `top` of logits, a `total` of exp(logit - top) and their `mean`.
Inside a chunk the weights exp(l_j - M_t) of the tokens j at each row t are a matrix, and its product with the values is
taken on tensor cores: M_t is the largest of everything that row t reads, so all weights are in [0, 1]. Weights are
summed as they were rounded for the product, so that a mean is one exactly.

Backward, dv_j = sum over the rows t that read j of p_tj dy_t and dl_j = v_j . dv_j - sum of p_tj delta_t, where
p_tj = exp(l_j - M_t) / D_t with the row's total D_t and delta_t = dy_t . y_t. All rows after a chunk are one row:
`low` is the least of their M_t, `flow` the sum of exp(low - M_t) / D_t dy_t, `lost` that of delta_t, and p_tj is
exp(l_j - low) times theirs. No logit that a row reads is above its M_t, so these factors are in [0, 1] too.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

from multilin.ops.kernels.gpu_tiles import store_rounded


@triton.jit
def load_row(p_row, o_t, m_t, stride, other):
    """One number per position."""
    return tl.load(p_row + o_t.to(tl.int64) * stride, mask=m_t, other=other)


@triton.jit
def load_tile(p_tile, o_t, m_t, stride, o_d, m_d):
    """A vector per position, 0 where there is none."""
    return tl.load(p_tile + o_t[:, None].to(tl.int64) * stride + o_d[None, :], m_t[:, None] & m_d[None, :], 0.0)


@triton.jit
def store_tile(p_tile, o_t, m_t, stride, o_d, m_d, b_tile):
    """A vector per position."""
    p_out = p_tile + o_t[:, None].to(tl.int64) * stride + o_d[None, :]
    store_rounded(p_out, b_tile, m_t[:, None] & m_d[None, :])


@triton.jit
def finite(top):
    """A shift that is a number, where nothing or no row was read yet."""
    return tl.where(tl.abs(top) == float("inf"), 0.0, top)


@triton.jit
def inverse(total):
    """1 / total, 0 of 0."""
    return tl.where(total > 0, 1.0 / tl.where(total > 0, total, 1.0), 0.0)


@triton.jit
def absorb(top, total, b_mean, b_logits, b_totals, b_values):
    """One token for the one given and those of a tile, each of which stands for `totals` of its weight."""
    new_top = tl.maximum(top, tl.max(b_logits, axis=0))
    b_weights = b_totals * tl.exp(b_logits - finite(new_top))
    past = total * tl.exp(top - finite(new_top))
    new_total = past + tl.sum(b_weights, axis=0)
    b_sum = past * b_mean + tl.sum(b_weights[:, None] * b_values.to(tl.float32), axis=0)
    return new_top, new_total, b_sum * inverse(new_total)


@triton.jit
def absorb_rows(low, b_flow, lost, b_tops, b_scales, b_dmeans, b_deltas):
    """One row for the one given and those of a tile; `scales` are 1 / D_t."""
    new_low = tl.minimum(low, tl.min(b_tops, axis=0))
    b_shares = b_scales * tl.exp(finite(new_low) - b_tops)
    kept = tl.exp(finite(new_low) - low)
    b_flow = kept * b_flow + tl.sum(b_shares[:, None] * b_dmeans.to(tl.float32), axis=0)
    return new_low, b_flow, kept * lost + tl.sum(b_shares * b_deltas, axis=0)


@triton.jit
def text_at(p_text, position):
    """Number of the text of one position; 0 before the first."""
    return tl.load(p_text + position, mask=position >= 0, other=0)
