"""CPU kernels around int8 products.

The largest magnitude is found on the bits without their sign, which are ordered as the numbers are, with nan above all:
so nan and inf reach the scale. Adding 1.5 * 2^23 rounds to an integer, ties to even, and leaves it in the low bits.
"""

import numpy as np
from numba import carray, njit

from multilin.ops.block_outer.cpu_kernels import contract_blocks, expand_blocks
from multilin.ops.kernels.cpu_intrinsics import EXACT, ONE, ZERO, array, floats, narrow, part_of_rows, widen

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
    # The half that rounding to the nearest adds is taken off again; +-127 itself must not be passed.
    moved = np.float32(number + noise - _HALF)
    moved = moved if moved < _LARGEST else _LARGEST
    return _to_int8(moved if moved > -_LARGEST else -_LARGEST)


@njit(**EXACT)
def _magnitude(number):
    return np.float32(number).view(np.int32) & _MAGNITUDE


@njit(**EXACT)
def _scale_and_inverse(largest):
    """Scale of the numbers whose largest magnitude this is, and its inverse, 0 where it is 0 or not finite."""
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


def round_rows(tasks, elements, index, sources):
    """One part of the rows of x (num_rows, width) to int8 values and float32 scales; at random for a seed >= 0."""
    task = carray(tasks, (1,))[0]
    first, last = part_of_rows(task.num_rows, task.num_parts, index)
    x = array(elements, task.x, (task.num_rows, task.width))
    values = array(np.int8, task.values, (task.num_rows, task.width))
    scales = floats(task.scales, 1, task.num_rows)[0]
    for i in range(first, last):
        scales[i] = _round_row(x[i], task.seed, np.uint32(i * task.width), values[i])


@njit(**EXACT)
def _raise_largest(x, row_scale, largest):
    for j in range(x.size):
        largest[j] = max(largest[j], _magnitude(widen(x[j]) * row_scale))


@njit(**EXACT)
def _round_scaled(x, row_scale, inverse, seed, first, values):
    for j in range(x.size):
        values[j] = _to_int8_randomly(widen(x[j]) * row_scale * inverse[j], _noise(seed, first + np.uint32(j)))


def round_columns(tasks, elements, index, sources):
    """One part of the columns of row_scales (num_rows) * x (num_rows, width) to int8 at random, with their scales."""
    task = carray(tasks, (1,))[0]
    rows, width = task.num_rows, task.width
    x = array(elements, task.x, (rows, width))
    values = array(np.int8, task.values, (rows, width))
    row_scales, scales = floats(task.row_scales, 1, rows)[0], floats(task.scales, 1, width)[0]
    start, stop = part_of_rows(width, task.num_parts, index)
    largest = np.zeros(stop - start, np.int32)
    inverse = np.empty(stop - start, np.float32)
    for i in range(rows):
        _raise_largest(x[i, start:stop], row_scales[i], largest)
    for j in range(stop - start):
        scales[start + j], inverse[j] = _scale_and_inverse(largest[j])
    for i in range(rows):
        first = np.uint32(i * width + start)
        _round_scaled(x[i, start:stop], row_scales[i], inverse, np.uint32(task.seed), first, values[i, start:stop])


@njit(**EXACT)
def _scale_row(product, scale, bias, result):
    has_bias = bias.size > 0
    for j in range(product.size):
        number = np.float32(product[j]) * scale
        if has_bias:
            number = number + bias[j]
        result[j] = narrow(number, result[j])


def scale_rows(tasks, elements, index, sources):
    """One part of the rows of product (num_rows, width) int32 * scale of the row + bias (width), unless that is 0."""
    task = carray(tasks, (1,))[0]
    first, last = part_of_rows(task.num_rows, task.num_parts, index)
    product = array(np.int32, task.product, (task.num_rows, task.width))
    result = array(elements, task.result, (task.num_rows, task.width))
    scales, bias = (
        floats(task.scales, 1, task.num_rows)[0],
        floats(task.bias, 1, task.width if task.bias != 0 else 0)[0],
    )
    for i in range(first, last):
        _scale_row(product[i], scales[i], bias, result[i])


def round_pairs(tasks, elements, index, sources):
    """Products of pairs of float32 in one part of the rows, as for `block_outer`, to int8 values and float32 scales."""
    task = carray(tasks, (1,))[0]
    R, N, K, J = task.num_rows, task.num_blocks, task.left_width, task.right_width
    first, last = part_of_rows(R, task.num_parts, index)
    values, scales = array(np.int8, task.values, (R, N * K * J)), floats(task.scales, 1, R)[0]
    pairs = np.empty(N * K * J, np.float32)
    for i in range(first, last):
        left, right = task.left + 4 * i * N * K, task.right + 4 * i * N * J
        expand_blocks(np.float32, left, right, pairs.ctypes.data, N, K, J, 4)
        scales[i] = _round_row(pairs, -1, np.uint32(0), values[i])


def contract_pairs(tasks, elements, index, sources):
    """Gradients of both factors, float32, in one part of the rows from product int32 * scale of the row."""
    task = carray(tasks, (1,))[0]
    R, N, K, J = task.num_rows, task.num_blocks, task.left_width, task.right_width
    first, last = part_of_rows(R, task.num_parts, index)
    product, scales = array(np.int32, task.product, (R, N * K * J)), floats(task.scales, 1, R)[0]
    dpairs, no_bias = np.empty(N * K * J, np.float32), np.empty(0, np.float32)
    for i in range(first, last):
        _scale_row(product[i], scales[i], no_bias, dpairs)
        at_left, at_right = 4 * i * N * K, 4 * i * N * J
        contract_blocks(
            np.float32, task.left + at_left, task.right + at_right, dpairs.ctypes.data, task.dleft + at_left,
            task.dright + at_right, N, K, J, 4,
        )  # fmt: skip
