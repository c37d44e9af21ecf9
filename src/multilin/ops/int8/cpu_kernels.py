"""CPU kernels around int8 products.

The largest magnitude is found by comparing bits without the sign. Bits have the order of the magnitudes, with nan
largest, so nan and inf reach the scale. Adding 1.5 * 2^23 rounds a number to an integer in the low bits, ties to even.
"""

import numpy as np
from numba import njit

from multilin.ops.block_outer.cpu_kernels import contract_blocks, expand_blocks
from multilin.ops.kernels.cpu_intrinsics import EXACT, ONE, ZERO, arguments_of, narrow, part_of, widen

_MAGNITUDE = np.int32(0x7FFFFFFF)
_MAGIC = np.float32(12582912.0)
_MAGIC_BITS = np.int32(0x4B400000)
_HALF, _LARGEST = np.float32(0.5), np.float32(127.0)
_UNIT = np.float32(2.0**-24)


@njit(**EXACT)
def _noise(seed, index):
    """A number in [0, 1) that depends on seed and index only."""
    mixed = np.uint32(np.uint32(index) * np.uint32(0x9E3779B9) + seed)
    mixed = np.uint32((mixed ^ (mixed >> np.uint32(16))) * np.uint32(0x85EBCA6B))
    mixed = np.uint32((mixed ^ (mixed >> np.uint32(13))) * np.uint32(0xC2B2AE35))
    mixed = np.uint32(mixed ^ (mixed >> np.uint32(16)))
    return np.float32(np.int32(mixed >> np.uint32(8))) * _UNIT


@njit(**EXACT)
def _to_int8(number):
    return np.int8(np.float32(number + _MAGIC).view(np.int32) - _MAGIC_BITS)


@njit(**EXACT)
def _to_int8_randomly(number, noise):
    # Subtract the 0.5 that rounding to the nearest adds; the result must stay within +-127.
    moved = np.float32(number + noise - _HALF)
    moved = moved if moved < _LARGEST else _LARGEST
    return _to_int8(moved if moved > -_LARGEST else -_LARGEST)


@njit(**EXACT)
def _magnitude(number):
    return np.float32(number).view(np.int32) & _MAGNITUDE


@njit(**EXACT)
def _scale_and_inverse(largest):
    """Return the scale for a largest magnitude, and 1 / scale, which is 0 instead if the scale is 0 or not finite."""
    scale = np.int32(largest).view(np.float32) / _LARGEST
    return scale, ONE / scale if scale > ZERO and scale < np.float32(np.inf) else ZERO


@njit(**EXACT)
def _round_row(x, seed, first, values):
    largest = np.int32(0)
    for j in range(x.size):
        largest = max(largest, _magnitude(widen(x[j])))
    scale, inverse = _scale_and_inverse(largest)
    if seed < 0:
        for j in range(x.size):
            values[j] = _to_int8(widen(x[j]) * inverse)
    else:
        mixed = np.uint32(seed)
        for j in range(x.size):
            values[j] = _to_int8_randomly(widen(x[j]) * inverse, _noise(mixed, first + np.uint32(j)))
    return scale


def round_rows(task, elements, index, sources):
    """Round one part of the rows of x to int8 values and float32 scales; at random for a seed >= 0."""
    num_parts, x, seed, values, scales = arguments_of(task)
    first, last = part_of(len(x), num_parts, index)
    for i in range(first, last):
        scales[i, 0] = _round_row(x[i], seed, np.uint32(i * x.shape[1]), values[i])


@njit(**EXACT)
def _raise_largest(x, row_scale, largest):
    for j in range(x.size):
        largest[j] = max(largest[j], _magnitude(widen(x[j]) * row_scale))


@njit(**EXACT)
def _round_scaled(x, row_scale, inverse, seed, first, values):
    for j in range(x.size):
        values[j] = _to_int8_randomly(widen(x[j]) * row_scale * inverse[j], _noise(seed, first + np.uint32(j)))


def round_columns(task, elements, index, sources):
    """Round one part of the columns of row_scales (rows, 1) * x to int8 at random, with their scales (columns, 1)."""
    num_parts, x, row_scales, seed, values, scales = arguments_of(task)
    rows, width = x.shape
    start, stop = part_of(width, num_parts, index)
    largest = np.zeros(stop - start, np.int32)
    inverse = np.empty(stop - start, np.float32)
    for i in range(rows):
        _raise_largest(x[i, start:stop], row_scales[i, 0], largest)
    for j in range(stop - start):
        scales[start + j, 0], inverse[j] = _scale_and_inverse(largest[j])
    for i in range(rows):
        first = np.uint32(i * width + start)
        _round_scaled(x[i, start:stop], row_scales[i, 0], inverse, np.uint32(seed), first, values[i, start:stop])


@njit(**EXACT)
def _scale_row(product, scale, bias, result):
    has_bias = bias.size > 0
    for j in range(product.size):
        number = np.float32(product[j]) * scale
        if has_bias:
            number = number + bias[j]
        result[j] = narrow(number, result[j])


def scale_rows(task, elements, index, sources):
    """Compute product (int32) * scales (rows, 1) + bias (width) for one part of the rows; bias may be empty."""
    num_parts, product, scales, bias, result = arguments_of(task)
    first, last = part_of(len(product), num_parts, index)
    for i in range(first, last):
        _scale_row(product[i], scales[i, 0], bias, result[i])


def round_pairs(task, elements, index, sources):
    """Round the products of float32 pairs (see `block_outer`), in one part of the rows, to int8 and float32 scales."""
    num_parts, left, right, values, scales = arguments_of(task)
    N, (first, last) = len(left) // len(values), part_of(len(values), num_parts, index)
    pairs = np.empty(values.shape[1], np.float32)
    for i in range(first, last):
        expand_blocks(left[i * N : (i + 1) * N], right[i * N : (i + 1) * N], pairs)
        scales[i, 0] = _round_row(pairs, -1, np.uint32(0), values[i])


def contract_pairs(task, elements, index, sources):
    """Compute float32 gradients of both factors for one part of the rows, from product (int32) * scales (rows, 1)."""
    num_parts, product, scales, left, right, dleft, dright = arguments_of(task)
    N, (first, last) = len(left) // len(product), part_of(len(product), num_parts, index)
    dpairs, no_bias = np.empty(product.shape[1], np.float32), np.empty(0, np.float32)
    for i in range(first, last):
        _scale_row(product[i], scales[i, 0], no_bias, dpairs)
        blocks = slice(i * N, (i + 1) * N)
        contract_blocks(dpairs, left[blocks], right[blocks], dleft[blocks], dright[blocks])
