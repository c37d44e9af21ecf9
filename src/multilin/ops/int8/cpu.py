"""CPU kernels around int8 products. Floats come as their bits, so that bf16 is float32 shifted by 16.

The largest magnitude is found on the bits without their sign, which are ordered as the numbers are, with nan above all:
so nan and inf reach the scale. Adding 1.5 * 2^23 rounds to an integer, ties to even, and leaves it in the low bits.
"""

import functools
from typing import Any

import numpy as np
from numba import njit, prange

from multilin.ops.kernels.cpu_launch import _with_own_cache_file

SERIAL: Any = {"error_model": "numpy"}
PARALLEL: Any = {"parallel": True, "cache": True, "nogil": True, "error_model": "numpy"}

_MAGNITUDE = np.int32(0x7FFFFFFF)
_INFINITE = np.int32(0x7F800000)
_MAGIC = np.float32(12582912.0)
_MAGIC_BITS = np.int32(0x4B400000)
_ZERO, _HALF, _ONE, _LARGEST = np.float32(0.0), np.float32(0.5), np.float32(1.0), np.float32(127.0)
_UNIT = np.float32(2.0**-24)
_COLUMNS = 128  # of one piece of work


@functools.cache
def compiled(name: str, shift: int) -> Any:
    """The kernel of that name for numbers whose bits are shifted so far, which tells their type."""
    return njit(**PARALLEL)(_with_own_cache_file(globals()[name], f"shifted {shift}"))


@njit(**SERIAL)
def _float(bits: Any) -> Any:
    return np.int32(bits).view(np.float32)


@njit(**SERIAL)
def _magnitude(number: Any) -> Any:
    return np.float32(number).view(np.int32) & _MAGNITUDE


@njit(**SERIAL)
def _noise(seed: Any, index: Any) -> Any:
    """A number in [0, 1) that depends on seed and index only."""
    mixed = np.uint32(np.uint32(index) * np.uint32(0x9E3779B9) + seed)
    mixed = np.uint32((mixed ^ (mixed >> np.uint32(16))) * np.uint32(0x85EBCA6B))
    mixed = np.uint32((mixed ^ (mixed >> np.uint32(13))) * np.uint32(0xC2B2AE35))
    mixed = np.uint32(mixed ^ (mixed >> np.uint32(16)))
    return np.float32(np.int32(mixed >> np.uint32(8))) * _UNIT


@njit(**SERIAL)
def _to_int8(number: Any) -> Any:
    return np.int8(np.float32(number + _MAGIC).view(np.int32) - _MAGIC_BITS)


@njit(**SERIAL)
def _to_int8_randomly(number: Any, noise: Any) -> Any:
    # The half that rounding to the nearest adds is taken off again; +-127 itself must not be passed.
    moved = np.float32(number + noise - _HALF)
    moved = moved if moved < _LARGEST else _LARGEST
    return _to_int8(moved if moved > -_LARGEST else -_LARGEST)


@njit(**SERIAL)
def _inverse(scale: Any) -> Any:
    return _ONE / scale if scale > _ZERO and scale < np.float32(np.inf) else _ZERO


@njit(**SERIAL)
def _round_row(x: Any, move: Any, seed: Any, first: Any, values: Any) -> Any:
    largest = np.int32(0)
    for j in range(x.size):
        largest = max(largest, (np.int32(x[j]) << move) & _MAGNITUDE)
    scale = _float(largest) / _LARGEST
    inverse = _inverse(scale)
    if seed < 0:
        for j in range(x.size):
            values[j] = _to_int8(_float(np.int32(x[j]) << move) * inverse)
    else:
        mixed = np.uint32(seed)
        for j in range(x.size):
            values[j] = _to_int8_randomly(_float(np.int32(x[j]) << move) * inverse, _noise(mixed, first + np.uint32(j)))
    return scale


def round_rows(shift: int, x: Any, seed: int, values: Any, scales: Any) -> None:
    """x (R, n) bits to int8 and scales (R, 1); at random if the seed is not negative."""
    for i in prange(x.shape[0]):
        scales[i, 0] = _round_row(x[i], np.int32(shift), seed, np.uint32(i * x.shape[1]), values[i])


@njit(**SERIAL)
def _raise_largest(x: Any, move: Any, row_scale: Any, largest: Any) -> None:
    for j in range(x.size):
        largest[j] = max(largest[j], _magnitude(_float(np.int32(x[j]) << move) * row_scale))


@njit(**SERIAL)
def _round_scaled(x: Any, move: Any, row_scale: Any, inverse: Any, seed: Any, first: Any, values: Any) -> None:
    for j in range(x.size):
        number = _float(np.int32(x[j]) << move) * row_scale * inverse[j]
        values[j] = _to_int8_randomly(number, _noise(seed, first + np.uint32(j)))


def round_columns(shift: int, x: Any, row_scales: Any, seed: int, values: Any, scales: Any) -> None:
    """row_scale * x (R, n) to int8 at random, with scales (n,)."""
    rows, width = x.shape
    for piece in prange((width + _COLUMNS - 1) // _COLUMNS):
        columns = slice(piece * _COLUMNS, min((piece + 1) * _COLUMNS, width))
        size = columns.stop - columns.start
        largest = np.zeros(size, np.int32)
        inverse = np.empty(size, np.float32)
        for i in range(rows):
            _raise_largest(x[i, columns], np.int32(shift), row_scales[i], largest)
        for j in range(size):
            scales[columns.start + j] = _float(largest[j]) / _LARGEST
            inverse[j] = _inverse(scales[columns.start + j])
        for i in range(rows):
            first = np.uint32(i * width + columns.start)
            _round_scaled(
                x[i, columns], np.int32(shift), row_scales[i], inverse, np.uint32(seed), first, values[i, columns]
            )


@njit(**SERIAL)
def _scale_row(product: Any, scale: Any, bias: Any, result: Any, move: Any) -> None:
    half, last = (np.int32(0x7FFF), np.int32(1)) if move else (np.int32(0), np.int32(0))
    has_bias = bias.size > 0
    for j in range(product.size):
        number = np.float32(product[j]) * scale
        if has_bias:
            number = number + bias[j]
        bits = np.float32(number).view(np.int32)
        rounded = np.int32(bits + half + ((bits >> np.int32(16)) & last))
        result[j] = (rounded if (bits & _MAGNITUDE) <= _INFINITE else bits) >> move


def scale_rows(shift: int, product: Any, scales: Any, bias: Any, result: Any) -> None:
    """product (R, n) int32 * scale of the row + bias, as bits of float32 or bf16."""
    for i in prange(product.shape[0]):
        _scale_row(product[i], scales[i], bias, result[i], np.int32(shift))


@njit(**SERIAL)
def _round_row_of_pairs(left: Any, right: Any, move: Any, values: Any) -> Any:
    (blocks, width), other = left.shape, right.shape[1]
    lefts = np.empty((width, blocks), np.float32)
    rights = np.empty((other, blocks), np.float32)
    for n in range(blocks):
        for k in range(width):
            lefts[k, n] = _float(np.int32(left[n, k]) << move)
        for j in range(other):
            rights[j, n] = _float(np.int32(right[n, j]) << move)
    largest = np.int32(0)
    for k in range(width):
        for j in range(other):
            for n in range(blocks):
                largest = max(largest, _magnitude(lefts[k, n] * rights[j, n]))
    scale = _float(largest) / _LARGEST
    inverse = _inverse(scale)
    for k in range(width):
        for j in range(other):
            for n in range(blocks):
                values[k, j, n] = _to_int8(lefts[k, n] * rights[j, n] * inverse)
    return scale


def round_pairs(shift: int, left: Any, right: Any, values: Any, scales: Any) -> None:
    """Products left[n, k] * right[n, j] of every row as int8 (R, K, J, N), one scale (R, 1) per row."""
    for i in prange(left.shape[0]):
        scales[i, 0] = _round_row_of_pairs(left[i], right[i], np.int32(shift), values[i])


@njit(**SERIAL)
def _contract_row(product: Any, scale: Any, left: Any, right: Any, move: Any, dleft: Any, dright: Any) -> None:
    width, other, blocks = product.shape
    rights = np.empty((other, blocks), np.float32)
    lefts = np.empty(blocks, np.float32)
    dright[:] = _ZERO
    dleft[:] = _ZERO
    for j in range(other):
        for n in range(blocks):
            rights[j, n] = _float(np.int32(right[n, j]) << move)
    for k in range(width):
        for n in range(blocks):
            lefts[n] = _float(np.int32(left[n, k]) << move)
        for j in range(other):
            for n in range(blocks):
                number = np.float32(product[k, j, n]) * scale
                dleft[k, n] += number * rights[j, n]
                dright[j, n] += number * lefts[n]


def contract_pairs(shift: int, product: Any, scales: Any, left: Any, right: Any, dleft: Any, dright: Any) -> None:
    """dleft[k, n] = sum_j p[k, j, n] right[n, j], dright[j, n] = sum_k p[k, j, n] left[n, k]; p = product * scale."""
    for i in prange(product.shape[0]):
        _contract_row(product[i], scales[i], left[i], right[i], np.int32(shift), dleft[i], dright[i])
