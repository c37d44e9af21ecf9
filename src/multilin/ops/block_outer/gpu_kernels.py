"""Triton kernels of `block_outer`: pairs are made in registers between the loads and the matrix product.

A chunk is BN blocks x BK numbers of the left block x the whole right block (padded to BJ); it holds BF = BN BK BJ
pairs, in the order in which they multiply the weight. BN > 1 only where a chunk holds whole left blocks.

Where p_scale is not None, it holds a number per row by which pairs are divided and rounded to whole ones. They are
multiplied as int8 with int8, summed in int32; as floats, where the other factor is one, they get their scale back.
"""

import triton
import triton.language as tl

from multilin.ops.kernels.gpu_launch import autotuned
from multilin.ops.kernels.gpu_tiles import divide, dot, load_tile, narrow, nearest, store_rounded, store_tile

# Outputs of a tile, warps and pipeline stages.
WAYS = [({"BD": 64}, 4, 3), ({"BD": 128}, 8, 3), ({"BD": 32}, 4, 4)]
KIND = ("num_outs", "N", "K", "J", "BR")


@triton.jit
def factor_places(i_rows, row_stride, num_rows, i_block, i_first, N, WIDTH, BN: tl.constexpr, BW: tl.constexpr):
    """Where numbers i_first .. i_first + BW of BN blocks are, (rows, BN, BW), and whether they exist."""
    i_blocks, i_numbers = i_block + tl.arange(0, BN), i_first + tl.arange(0, BW)
    places = i_rows.to(tl.int64)[:, None, None] * row_stride + (i_blocks[:, None] * WIDTH + i_numbers[None, :])[None]
    inside = (i_blocks < N)[:, None] & (i_numbers < WIDTH)[None, :]
    return places, (i_rows < num_rows)[:, None, None] & inside[None]


@triton.jit
def load_factor(p_x, i_rows, row_stride, num_rows, i_block, i_first, N, WIDTH, BN: tl.constexpr, BW: tl.constexpr):
    """Numbers of a factor in float32, 0 outside."""
    places, mask = factor_places(i_rows, row_stride, num_rows, i_block, i_first, N, WIDTH, BN, BW)
    return tl.load(p_x + places, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_factor(p_x, x, i_rows, row_stride, num_rows, i_block, i_first, N, WIDTH, BN: tl.constexpr, BW: tl.constexpr):
    """Store what `load_factor` would load."""
    places, mask = factor_places(i_rows, row_stride, num_rows, i_block, i_first, N, WIDTH, BN, BW)
    store_rounded(p_x + places, x, mask)


@triton.jit
def weight_places(i_block, i_left, N, K, J, BN: tl.constexpr, BK: tl.constexpr, BJ: tl.constexpr, DENSE: tl.constexpr):
    """Where in a row of the weight a chunk's pairs are (BF,), and whether they exist.

    DENSE: the chunk's pairs follow one another there, and are loaded as such.
    """
    i_pairs = tl.arange(0, BN * BK * BJ)
    if DENSE:
        first = i_block * K * J + i_left * J
        last = N * K * J if BN > 1 else (i_block + 1) * K * J
        return first + i_pairs, first + i_pairs < last
    i_blocks, i_lefts, i_rights = i_block + i_pairs // (BK * BJ), i_left + i_pairs // BJ % BK, i_pairs % BJ
    inside = (i_blocks < N) & (i_lefts < K) & (i_rights < J)
    return (i_blocks * K + i_lefts) * J + i_rights, inside


@triton.jit
def make_pairs(left, right, p_scale, i_rows, num_rows, dtype: tl.constexpr, BR: tl.constexpr, BF: tl.constexpr):
    """(rows, BN, BK) and (rows, BN, BJ) to (rows, BF) of this type."""
    pairs = tl.reshape(left[:, :, :, None] * right[:, :, None, :], (BR, BF))
    if p_scale is not None:
        scale = tl.load(p_scale + i_rows, mask=i_rows < num_rows, other=0.0)[:, None]
        pairs = nearest(divide(pairs, scale))
        if dtype != tl.int8:
            pairs = pairs * scale
    return narrow(pairs, dtype)


@autotuned(WAYS, KIND)
@triton.jit
def forward(
    p_left, p_right, num_rows, left_stride, right_stride, p_scale, p_weight, p_factor, p_result, num_outs,
    chunks_per_split,
    N: tl.constexpr, K: tl.constexpr, J: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BJ: tl.constexpr,
    DENSE: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """result[split, r, d] = sum over the split's chunks of pairs[r, f] weight[d, f].

    Sums of int8 products are stored as such, or times scale[r] and factor where the result is a float.
    """
    BF: tl.constexpr = BN * BK * BJ
    CHUNKS_OF_LEFT: tl.constexpr = (K + BK - 1) // BK
    NUM_CHUNKS: tl.constexpr = CHUNKS_OF_LEFT * ((N + BN - 1) // BN)
    i_rows, i_outs = tl.program_id(0) * BR + tl.arange(0, BR), tl.program_id(1) * BD + tl.arange(0, BD)
    i_split = tl.program_id(2)
    SUM: tl.constexpr = tl.int32 if p_weight.dtype.element_ty == tl.int8 else tl.float32
    b_result = tl.zeros((BR, BD), SUM)
    for chunk in range(i_split * chunks_per_split, min((i_split + 1) * chunks_per_split, NUM_CHUNKS)):
        i_block, i_left = chunk // CHUNKS_OF_LEFT * BN, chunk % CHUNKS_OF_LEFT * BK
        b_left = load_factor(p_left, i_rows, left_stride, num_rows, i_block, i_left, N, K, BN, BK)
        b_right = load_factor(p_right, i_rows, right_stride, num_rows, i_block, 0, N, J, BN, BJ)
        i_pairs, m_pairs = weight_places(i_block, i_left, N, K, J, BN, BK, BJ, DENSE)
        b_weight = load_tile(p_weight, i_outs, i_outs < num_outs, N * K * J, i_pairs, m_pairs)
        b_pairs = make_pairs(b_left, b_right, p_scale, i_rows, num_rows, b_weight.dtype, BR, BF)
        b_result += dot(b_pairs, tl.trans(b_weight))
    if p_factor is not None:
        scale = tl.load(p_scale + i_rows, mask=i_rows < num_rows, other=0.0) * tl.load(p_factor)
        b_result = b_result.to(tl.float32) * scale[:, None]
    p_result += i_split.to(tl.int64) * num_rows * num_outs
    store_tile(p_result, i_rows, i_rows < num_rows, num_outs, i_outs, i_outs < num_outs, b_result)


@autotuned(WAYS, KIND)
@triton.jit
def backward_factors(
    p_left, p_right, num_rows, left_stride, right_stride, p_weight, p_dresult, dresult_stride, p_scale, p_factor,
    p_dleft, p_dright, num_outs, chunks_per_split,
    N: tl.constexpr, K: tl.constexpr, J: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BJ: tl.constexpr,
    DENSE: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """dleft of a split's part of the left blocks, and dright[split], summed over that part.

    The gradient of pairs is dresult @ weight, times scale[r] and factor where they are not None.
    """
    BF: tl.constexpr = BN * BK * BJ
    i_rows = tl.program_id(0) * BR + tl.arange(0, BR)
    i_block, i_split = tl.program_id(1) * BN, tl.program_id(2)
    b_right = load_factor(p_right, i_rows, right_stride, num_rows, i_block, 0, N, J, BN, BJ)
    b_dright = tl.zeros((BR, BN, BJ), tl.float32)
    scale = tl.full((BR,), 1.0, tl.float32)
    if p_scale is not None:
        scale = tl.load(p_scale + i_rows, mask=i_rows < num_rows, other=0.0)
    if p_factor is not None:
        scale = scale * tl.load(p_factor)
    SUM: tl.constexpr = tl.int32 if p_weight.dtype.element_ty == tl.int8 else tl.float32
    for step in range(chunks_per_split):
        i_left = (i_split * chunks_per_split + step) * BK
        i_pairs, m_pairs = weight_places(i_block, i_left, N, K, J, BN, BK, BJ, DENSE)
        b_dpairs = tl.zeros((BR, BF), SUM)
        for i_out in range(0, num_outs, BD):
            i_outs = i_out + tl.arange(0, BD)
            b_weight = load_tile(p_weight, i_outs, i_outs < num_outs, N * K * J, i_pairs, m_pairs)
            b_dresult = load_tile(p_dresult, i_rows, i_rows < num_rows, dresult_stride, i_outs, i_outs < num_outs)
            b_dpairs += dot(b_dresult, b_weight)
        b_left = load_factor(p_left, i_rows, left_stride, num_rows, i_block, i_left, N, K, BN, BK)
        b_dproducts = tl.reshape(b_dpairs.to(tl.float32) * scale[:, None], (BR, BN, BK, BJ))
        b_dleft = tl.sum(b_dproducts * b_right[:, :, None, :], axis=3)
        store_factor(p_dleft, b_dleft, i_rows, N * K, num_rows, i_block, i_left, N, K, BN, BK)
        b_dright += tl.sum(b_dproducts * b_left[:, :, :, None], axis=2)
    p_part = p_dright + i_split.to(tl.int64) * num_rows * N * J
    store_factor(p_part, b_dright, i_rows, N * J, num_rows, i_block, 0, N, J, BN, BJ)


@autotuned(WAYS, KIND)
@triton.jit
def backward_weight(
    p_left, p_right, num_rows, left_stride, right_stride, p_scale, p_dresult, dresult_stride, p_factor, p_dweight,
    num_outs,
    N: tl.constexpr, K: tl.constexpr, J: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BJ: tl.constexpr,
    DENSE: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """dweight[d, f] = sum over rows of dresult[r, d] pairs[r, f] for one chunk, times factor[d] if not None."""
    BF: tl.constexpr = BN * BK * BJ
    CHUNKS_OF_LEFT: tl.constexpr = (K + BK - 1) // BK
    i_outs = tl.program_id(0) * BD + tl.arange(0, BD)
    i_block, i_left = tl.program_id(1) // CHUNKS_OF_LEFT * BN, tl.program_id(1) % CHUNKS_OF_LEFT * BK
    SUM: tl.constexpr = tl.int32 if p_dresult.dtype.element_ty == tl.int8 else tl.float32
    b_dweight = tl.zeros((BD, BF), SUM)
    for i_row in range(0, num_rows, BR):
        i_rows = i_row + tl.arange(0, BR)
        b_left = load_factor(p_left, i_rows, left_stride, num_rows, i_block, i_left, N, K, BN, BK)
        b_right = load_factor(p_right, i_rows, right_stride, num_rows, i_block, 0, N, J, BN, BJ)
        b_dresult = load_tile(p_dresult, i_rows, i_rows < num_rows, dresult_stride, i_outs, i_outs < num_outs)
        b_pairs = make_pairs(b_left, b_right, p_scale, i_rows, num_rows, b_dresult.dtype, BR, BF)
        b_dweight += dot(tl.trans(b_dresult), b_pairs)
    if p_factor is not None:
        factor = tl.load(p_factor + i_outs, mask=i_outs < num_outs, other=0.0)
        b_dweight = b_dweight.to(tl.float32) * factor[:, None]
    i_pairs, m_pairs = weight_places(i_block, i_left, N, K, J, BN, BK, BJ, DENSE)
    store_tile(p_dweight, i_outs, i_outs < num_outs, N * K * J, i_pairs, m_pairs, b_dweight)
