"""The kernel of `rotary`."""

import numpy as np
from numba import carray, njit

from multilin.ops.kernels.cpu_intrinsics import SCALARS, array, floats, narrow, part_of_rows, widen


@njit(forceinline=True, **SCALARS)
def turn_block(x, cos, sin, direction, result):
    """All pairs of one block."""
    half = cos.size
    for i in range(half):
        first, second = widen(x[i]), widen(x[half + i])
        turn = direction * sin[i]
        result[i] = narrow(first * cos[i] - second * turn, result[i])
        result[half + i] = narrow(first * turn + second * cos[i], result[half + i])


def turn(tasks, elements, index, sources):
    """One part of the positions of x (num_rows, heads, head_size), whose cos and sin are (num_rows, head_size / 2)."""
    task = carray(tasks, (1,))[0]
    width, block, num_pairs = task.width, task.block, task.head_size // 2
    first, last = part_of_rows(task.num_rows, task.num_parts, index)
    direction = np.float32(-1) if task.is_inverse != 0 else np.float32(1)
    x, results = array(elements, task.x, (task.num_rows, width)), array(elements, task.result, (task.num_rows, width))
    cosines, sines = floats(task.cos, task.num_rows, num_pairs), floats(task.sin, task.num_rows, num_pairs)
    for i in range(first, last):
        for start in range(0, width, block):
            part, pair = slice(start, start + block), start % task.head_size // 2
            pairs = slice(pair, pair + block // 2)
            turn_block(x[i, part], cosines[i, pairs], sines[i, pairs], direction, results[i, part])
