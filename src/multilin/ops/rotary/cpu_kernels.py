"""The kernel of `rotary`."""

import numpy as np
from numba import njit

from multilin.ops.kernels.cpu_intrinsics import SCALARS, arguments_of, narrow, part_of, widen


@njit(forceinline=True, **SCALARS)
def turn_block(x, cos, sin, direction, result):
    """All pairs of one block."""
    half = cos.size
    for i in range(half):
        first, second = widen(x[i]), widen(x[half + i])
        turn = direction * sin[i]
        result[i] = narrow(first * cos[i] - second * turn, result[i])
        result[half + i] = narrow(first * turn + second * cos[i], result[half + i])


def turn(task, elements, index, sources):
    """One part of the positions: x is (positions * heads, width), cos and sin are (positions, width / 2)."""
    num_parts, x, cos, sin, block, is_inverse, results = arguments_of(task)
    first, last = part_of(len(cos), num_parts, index)
    direction, head_size = np.float32(-1) if is_inverse != 0 else np.float32(1), x.shape[1]
    rows, turned = x.reshape((len(cos), -1)), results.reshape((len(cos), -1))
    for i in range(first, last):
        for start in range(0, rows.shape[1], block):
            part, pair = slice(start, start + block), start % head_size // 2
            pairs = slice(pair, pair + block // 2)
            turn_block(rows[i, part], cos[i, pairs], sin[i, pairs], direction, turned[i, part])
