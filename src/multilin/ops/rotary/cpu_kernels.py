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
    num_heads, direction = len(x) // len(cos), np.float32(-1) if is_inverse != 0 else np.float32(1)
    for i in range(first * num_heads, last * num_heads):
        for start in range(0, x.shape[1], block):
            part, pairs = slice(start, start + block), slice(start // 2, (start + block) // 2)
            turn_block(x[i, part], cos[i // num_heads, pairs], sin[i // num_heads, pairs], direction, results[i, part])
