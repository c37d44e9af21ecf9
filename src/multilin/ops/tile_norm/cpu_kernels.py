"""Kernels of `tile_norm`: a tile is read twice, the second time from the cache.

With s = 1 / rms of a tile and y = s x, the gradient is dx = s (dy - y mean(dy y)). It is made of x, not of y, which may
be rounded, since it is a difference; and s is kept. For a zero tile s = 0.
"""

from typing import Any

import numpy as np
from numba import carray, njit

from multilin.ops.numba_kernels.intrinsics import DOTS, SCALARS, like_first, like_second, narrow, widen
from multilin.ops.numba_kernels.parts import floats, part_of_rows

ZERO, ONE = np.float32(0), np.float32(1)


@njit(**DOTS)
def sum_of_squares(x: Any) -> Any:
    """In float32."""
    total = ZERO
    for i in range(x.size):
        number = widen(x[i])
        total += number * number
    return total


@njit(**DOTS)
def dot(x: Any, y: Any) -> Any:
    """In float32."""
    total = ZERO
    for i in range(x.size):
        total += widen(x[i]) * widen(y[i])
    return total


@njit(forceinline=True, **SCALARS)
def scaled(x: Any, scale: Any, result: Any) -> None:
    """result = scale x."""
    for i in range(x.size):
        result[i] = narrow(widen(x[i]) * scale, result[i])


@njit(forceinline=True, **SCALARS)
def gradient(dresult: Any, x: Any, scale: Any, dx: Any) -> None:
    """dx = s (dy - y mean(dy y)), y = s x."""
    mean = scale * dot(dresult, x) / np.float32(x.size)
    for i in range(dx.size):
        dx[i] = narrow(scale * (widen(dresult[i]) - mean * (scale * widen(x[i]))), dx[i])


def forward(tasks: Any, pairs: Any, index: int, sources: Any) -> None:
    """One part of the rows; the pairs are numbers of x and of the result."""
    task = carray(tasks, (1,))[0]
    width, tile, num_tiles = task.width, task.tile, task.width // task.tile
    first, last = part_of_rows(task.num_rows, task.num_parts, index)
    for i in range(first, last):
        x = carray(like_first(pairs, task.x + task.x_row * i), (width,))
        result = carray(like_second(pairs, task.result + task.result_row * i), (width,))
        for n in range(num_tiles):
            part = slice(n * tile, (n + 1) * tile)
            mean_square = sum_of_squares(x[part]) / np.float32(tile)
            scale = ONE / np.sqrt(mean_square) if mean_square != ZERO else ZERO
            scaled(x[part], scale, result[part])
            if task.scales != 0:
                floats(task.scales, task.num_rows, num_tiles)[i, n] = scale


def backward(tasks: Any, pairs: Any, index: int, sources: Any) -> None:
    """One part of the rows; the pairs are numbers of x and its gradient, and of the result's gradient."""
    task = carray(tasks, (1,))[0]
    width, tile, num_tiles = task.width, task.tile, task.width // task.tile
    first, last = part_of_rows(task.num_rows, task.num_parts, index)
    gradients = carray(like_first(pairs, task.dx), (task.num_rows, width))
    scales = floats(task.scales, task.num_rows, num_tiles)
    for i in range(first, last):
        x = carray(like_first(pairs, task.x + task.x_row * i), (width,))
        dresult = carray(like_second(pairs, task.result + task.result_row * i), (width,))
        for n in range(num_tiles):
            part = slice(n * tile, (n + 1) * tile)
            gradient(dresult[part], x[part], scales[i, n], gradients[i, part])
