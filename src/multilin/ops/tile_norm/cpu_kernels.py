"""Kernels of `tile_norm`: a tile is read twice, the second time from the cache.

With s = 1 / rms of a tile and y = s x, the gradient is dx = s (dy - y mean(dy y)). It is made of x, not of y, which may
be rounded, since it is a difference; and s is kept. For a zero tile s = 0.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import numpy as np
from numba import carray, njit

from multilin.ops.kernels.cpu_intrinsics import (
    DOTS,
    SCALARS,
    array,
    floats,
    member,
    narrow,
    part_of_rows,
    widen,
)

ZERO, ONE = np.float32(0), np.float32(1)


@njit(**DOTS)
def dot(x, y):
    """In float32."""
    total = ZERO
    for i in range(x.size):
        total += widen(x[i]) * widen(y[i])
    return total


@njit(forceinline=True, **SCALARS)
def scaled(x, scale, result):
    """result = scale x."""
    for i in range(x.size):
        result[i] = narrow(widen(x[i]) * scale, result[i])


@njit(forceinline=True, **SCALARS)
def gradient(dresult, x, scale, dx):
    """dx = s (dy - y mean(dy y)), y = s x."""
    mean = scale * dot(dresult, x) / np.float32(x.size)
    for i in range(dx.size):
        dx[i] = narrow(scale * (widen(dresult[i]) - mean * (scale * widen(x[i]))), dx[i])


def forward(tasks, pairs, index, sources):
    """One part of the rows of x (num_rows, width); the pairs are numbers of x and of the result.

    x_row is the bytes from one row of x to the next; scales is (num_rows, width / tile) float32.
    """
    task = carray(tasks, (1,))[0]
    width, tile, num_tiles = task.width, task.tile, task.width // task.tile
    first, last = part_of_rows(task.num_rows, task.num_parts, index)
    scales = floats(task.scales, task.num_rows, num_tiles)
    results = array(member(pairs, 1), task.result, (task.num_rows, width))
    for i in range(first, last):
        x = array(member(pairs, 0), task.x + task.x_row * i, (width,))
        for n in range(num_tiles):
            part = slice(n * tile, (n + 1) * tile)
            mean_square = dot(x[part], x[part]) / np.float32(tile)
            scale = ONE / np.sqrt(mean_square) if mean_square != ZERO else ZERO
            scaled(x[part], scale, results[i, part])
            scales[i, n] = scale


def backward(tasks, pairs, index, sources):
    """dx of one part of the rows; the pairs are numbers of x and dx, and of dresult. Otherwise as `forward`."""
    task = carray(tasks, (1,))[0]
    width, tile, num_tiles = task.width, task.tile, task.width // task.tile
    first, last = part_of_rows(task.num_rows, task.num_parts, index)
    gradients = array(member(pairs, 0), task.dx, (task.num_rows, width))
    scales = floats(task.scales, task.num_rows, num_tiles)
    for i in range(first, last):
        x = array(member(pairs, 0), task.x + task.x_row * i, (width,))
        dresult = array(member(pairs, 1), task.dresult + task.dresult_row * i, (width,))
        for n in range(num_tiles):
            part = slice(n * tile, (n + 1) * tile)
            gradient(dresult[part], x[part], scales[i, n], gradients[i, part])
