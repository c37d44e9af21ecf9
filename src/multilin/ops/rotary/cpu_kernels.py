"""The kernel of `rotary`."""

from typing import Any

import numpy as np
from numba import carray, njit

from multilin.ops.numba_kernels.intrinsics import SCALARS, like, narrow, widen
from multilin.ops.numba_kernels.parts import floats, part_of_rows


@njit(forceinline=True, **SCALARS)
def turn_block(x: Any, cos: Any, sin: Any, direction: Any, result: Any) -> None:
    """All pairs of one block."""
    half = cos.size
    for i in range(half):
        first, second = widen(x[i]), widen(x[half + i])
        turn = direction * sin[i]
        result[i] = narrow(first * cos[i] - second * turn, result[i])
        result[half + i] = narrow(first * turn + second * cos[i], result[half + i])


def turn(tasks: Any, elements: Any, index: int, sources: Any) -> None:
    """One part of the rows."""
    task = carray(tasks, (1,))[0]
    width, block, num_pairs = task.width, task.block, task.head_size // 2
    first, last = part_of_rows(task.num_rows, task.num_parts, index)
    direction = np.float32(-1) if task.is_inverse != 0 else np.float32(1)
    results = carray(like(elements, task.result), (task.num_rows, width))
    coses, sines = floats(task.cos, task.num_rows, num_pairs), floats(task.sin, task.num_rows, num_pairs)
    for i in range(first, last):
        x = carray(like(elements, task.x + task.x_row * i), (width,))
        for start in range(0, width, block):
            part = slice(start, start + block)
            pair = start % task.head_size // 2
            pairs = slice(pair, pair + block // 2)
            turn_block(x[part], coses[i, pairs], sines[i, pairs], direction, results[i, part])
