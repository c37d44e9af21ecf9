"""Kernels of `tile_norm`: a tile is read twice, the second time from the cache.

With s = 1 / rms of a tile and y = s x, the gradient is dx = s (dy - y mean(dy y)). A rounded y is too coarse for this
difference, so y is computed again from x and s. A zero tile has s = 0. `scales` holds the s of all tiles.
"""

import numpy as np
from numba import njit

from multilin.ops.kernels.cpu_intrinsics import DOTS, ONE, SCALARS, ZERO, arguments_of, narrow, part_of, widen

INFINITE, NAN = np.float32(np.inf), np.float32(np.nan)


@njit(**DOTS)
def mean_product(x, y):
    """Mean of x y in float32."""
    total = ZERO
    for i in range(x.size):
        total += widen(x[i]) * widen(y[i])
    return total / np.float32(x.size)


@njit(forceinline=True, **SCALARS)
def scaled(x, scale, y):
    """y = scale x."""
    for i in range(x.size):
        y[i] = narrow(widen(x[i]) * scale, y[i])


@njit(forceinline=True, **SCALARS)
def gradient(dy, x, scale, dx):
    """dx = s (dy - y mean(dy y)), y = s x."""
    mean = scale * mean_product(dy, x)
    for i in range(dx.size):
        dx[i] = narrow(scale * (widen(dy[i]) - mean * (scale * widen(x[i]))), dx[i])


def forward(task, elements, index, sources):
    """Compute y and scales for one part of the tiles."""
    num_parts, x, y, scales = arguments_of(task)
    shape = len(scales), x.size // len(scales)
    tiles, results = x.reshape(shape), y.reshape(shape)
    first, last = part_of(len(scales), num_parts, index)
    for i in range(first, last):
        mean_square = mean_product(tiles[i], tiles[i])
        if mean_square == INFINITE:
            scales[i] = NAN
        else:
            scales[i] = ONE / np.sqrt(mean_square) if mean_square != ZERO else ZERO
        scaled(tiles[i], scales[i], results[i])


def backward(task, elements, index, sources):
    """Compute dx for one part of the tiles."""
    num_parts, dy, x, scales, dx = arguments_of(task)
    shape = len(scales), x.size // len(scales)
    dresults, tiles, dtiles = dy.reshape(shape), x.reshape(shape), dx.reshape(shape)
    first, last = part_of(len(scales), num_parts, index)
    for i in range(first, last):
        gradient(dresults[i], tiles[i], scales[i], dtiles[i])
