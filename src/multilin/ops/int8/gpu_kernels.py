"""Triton kernels of int8 products: rounding in one pass from memory, and products scaled before they are written.

Rows are divided and rounded as in the portable steps, so that both give the same integers. Products of pairs are
rounded from float32, even if the factors are in half precision.
"""

import triton
import triton.language as tl

from multilin.ops.kernels.gpu_launch import autotuned
from multilin.ops.kernels.gpu_tiles import divide, dot, load_tile, magnitude, nearest, store_tile

# Columns of a tile of the result, length of a partial sum, warps and pipeline stages.
WAYS = [
    ({"BN": 128, "BK": 64}, 4, 4),
    ({"BN": 128, "BK": 128}, 8, 3),
    ({"BN": 256, "BK": 128}, 8, 3),
    ({"BN": 64, "BK": 128}, 4, 4),
]


@triton.jit
def to_int8(numbers, seed, places, RANDOM: tl.constexpr):
    """Round to the nearest integer, or up or down at random without bias."""
    if RANDOM:
        numbers = tl.floor(numbers + tl.rand(seed, places))
        return tl.minimum(tl.maximum(numbers, -127.0), 127.0).to(tl.int8)
    return nearest(numbers).to(tl.int8)


@triton.jit
def load_numbers(p_row, p_right, i_columns, width, K: tl.constexpr, J: tl.constexpr):
    """Load numbers of a row in float32; with a right factor, load products of pairs in blocks of K and J."""
    if p_right is None:
        return tl.load(p_row + i_columns, mask=i_columns < width, other=0.0).to(tl.float32)
    else:
        left = tl.load(p_row + i_columns // J, mask=i_columns < width, other=0.0).to(tl.float32)
        i_rights = i_columns // (K * J) * J + i_columns % J
        return left * tl.load(p_right + i_rights, mask=i_columns < width, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["seed"])
def round_rows(
    p_x, p_right, p_values, p_scale, width, row_stride, right_stride, seed,
    RANDOM: tl.constexpr, BW: tl.constexpr, K: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """Round one row to int8 with its scale, max |x| / 127; see `load_numbers`."""
    i_row = tl.program_id(0)
    p_row, p_whole = p_x + i_row.to(tl.int64) * row_stride, p_values + i_row.to(tl.int64) * width
    if p_right is not None:
        p_right += i_row.to(tl.int64) * right_stride
    largest = tl.zeros((BW,), tl.int32)
    for first in range(0, width, BW):
        i_columns = first + tl.arange(0, BW)
        largest = tl.maximum(largest, magnitude(load_numbers(p_row, p_right, i_columns, width, K, J)))
    scale = tl.div_rn(tl.max(largest, axis=0).to(tl.float32, bitcast=True), 127.0)
    tl.store(p_scale + i_row, scale)
    for first in range(0, width, BW):
        i_columns = first + tl.arange(0, BW)
        b_x = load_numbers(p_row, p_right, i_columns, width, K, J)
        b_values = to_int8(divide(b_x, scale), seed, i_row * width + i_columns, RANDOM)
        tl.store(p_whole + i_columns, b_values, mask=i_columns < width)


@triton.jit
def load_scaled(p_x, p_row_scale, i_rows, i_columns, num_rows, width, row_stride):
    """row_scale * x, (rows, columns)."""
    b_x = load_tile(p_x, i_rows, i_rows < num_rows, row_stride, i_columns, i_columns < width)
    return b_x.to(tl.float32) * tl.load(p_row_scale + i_rows, mask=i_rows < num_rows, other=0.0)[:, None]


@triton.jit
def largest_of_columns(
    p_x, p_row_scale, p_largest, num_rows, width, row_stride, rows_per_part, BR: tl.constexpr, BW: tl.constexpr
):
    """Update max |row_scale * x| of each column, stored as bits, with the numbers of one part of the rows."""
    i_columns = tl.program_id(0) * BW + tl.arange(0, BW)
    first = tl.program_id(1) * rows_per_part
    largest = tl.zeros((BW,), tl.int32)
    for step in range(0, rows_per_part, BR):
        i_rows = first + step + tl.arange(0, BR)
        b_x = load_scaled(p_x, p_row_scale, i_rows, i_columns, num_rows, width, row_stride)
        largest = tl.maximum(largest, tl.max(magnitude(b_x), axis=0))
    tl.atomic_max(p_largest + i_columns, largest, mask=i_columns < width)


@triton.jit(do_not_specialize=["seed"])
def round_columns(
    p_x, p_row_scale, p_largest, p_values, p_scale, num_rows, width, row_stride, seed,
    BR: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Round a tile of row_scale * x to int8 at random, and write it transposed."""
    i_rows, i_columns = tl.program_id(0) * BR + tl.arange(0, BR), tl.program_id(1) * BW + tl.arange(0, BW)
    b_x = load_scaled(p_x, p_row_scale, i_rows, i_columns, num_rows, width, row_stride)
    largest = tl.load(p_largest + i_columns, mask=i_columns < width, other=0)
    scale = tl.div_rn(largest.to(tl.float32, bitcast=True), 127.0)
    tl.store(p_scale + i_columns, scale, mask=i_columns < width)
    b_values = to_int8(divide(b_x, scale[None, :]), seed, i_rows[:, None] * width + i_columns[None, :], True)
    places = i_columns.to(tl.int64)[None, :] * num_rows + i_rows[:, None]
    tl.store(p_values + places, b_values, mask=(i_rows < num_rows)[:, None] & (i_columns < width)[None, :])


@autotuned(WAYS, ("num_columns", "length", "BM"))
@triton.jit
def scaled_product(
    p_left, p_right, p_row_scale, p_factor, p_bias, p_result, num_rows, num_columns, length,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """left (rows, length) @ right (columns, length)^T in int32, times row_scale and factor, plus bias."""
    i_rows, i_columns = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    m_rows, m_columns = i_rows < num_rows, i_columns < num_columns
    total = tl.zeros((BM, BN), tl.int32)
    for first in range(0, length, BK):
        i_sum = first + tl.arange(0, BK)
        b_left = load_tile(p_left, i_rows, m_rows, length, i_sum, i_sum < length)
        b_right = load_tile(p_right, i_columns, m_columns, length, i_sum, i_sum < length)
        total += dot(b_left, tl.trans(b_right))
    scale = tl.load(p_row_scale + i_rows, mask=m_rows, other=0.0) * tl.load(p_factor)
    b_result = total.to(tl.float32) * scale[:, None]
    if p_bias is not None:
        b_result = b_result + tl.load(p_bias + i_columns, mask=m_columns, other=0.0)[None, :].to(tl.float32)
    store_tile(p_result, i_rows, m_rows, num_columns, i_columns, m_columns, b_result)
