"""Running sums over a long text in the CPU kernels: pieces of time, and sums whose rounding errors do not add up.

A sum s_t = a_t s_(t-1) + w_t v_t in float32 is rounded at every position. So within ROWS positions it is
s_t = f_t s + n_t, where s is the sum before them, f_t the product of their a up to t, and n_t the sum over their own
tokens; s itself moves on in float64, once in ROWS positions.
"""

import numpy as np
from numba import njit

from multilin.ops.kernels.cpu_intrinsics import ONE, SCALARS, ZERO, floats
from multilin.ops.prefix_softmax.cpu import ROWS

PAGE, HALF = 4096, np.float32(0.5)  # bytes; a weight


@njit
def zeros_beside(address, num_heads, width):
    """Two arrays of zeros (H, D), one after the other, at the same place in a page of memory as an address.

    Processors compare the last 12 bits of addresses first, so stores elsewhere in the page may hold up loads of
    rows: where the allocator happened to place the array so, the backward pass took 1.2 times as long.
    """
    size = 2 * num_heads * width
    room = np.zeros(size + PAGE // 4, np.float32)
    first = (address - room.ctypes.data) % PAGE // 4
    both = room[first : first + size].reshape((2, num_heads, width))
    return both[0], both[1]


@njit
def assign(target, source):
    """Copy a matrix: `target[:] = source` may fail, and its error message takes longer to compile than all else."""
    for i in range(source.shape[0]):
        for j in range(source.shape[1]):
            target[i, j] = source[i, j]


@njit
def piece_bounds(task, piece):
    """First position of a piece of time, and the one after its last; multiples of ROWS, but for the end."""
    chunks, num_pieces = (task.num_time + ROWS - 1) // ROWS, task.num_parts * task.num_parts
    return chunks * piece // num_pieces * ROWS, min(task.num_time, chunks * (piece + 1) // num_pieces * ROWS)


@njit
def summary(task, piece):
    """The summary of a piece of time, see the kernels: numbers (3, H) and vectors (H, D)."""
    address = task.summaries + 4 * piece * task.num_heads * (3 + task.width)
    return floats(address, 3, task.num_heads), floats(address + 12 * task.num_heads, task.num_heads, task.width)


@njit
def checkpoint(task, chunk):
    """The mean before position chunk * ROWS, (H, D), or the one after the last position."""
    return floats(task.checkpoints + 4 * task.num_heads * task.width * chunk, task.num_heads, task.width)


@njit(**SCALARS)
def exact_decay(lost, left):
    """A weight `left` and what it lost, as 1 - lost in float64: in float32 a weight near 1 is too coarse."""
    return 1.0 - lost if left > HALF else np.float64(left)


@njit(**SCALARS)
def move_on(exact, lost, left, new, rounded):
    """Update the sums (H, D) after some rows, exact = left exact + new, also in float32; reset the other sums.

    Args:
        exact, rounded: the sums before, in float64 and float32.
        lost, left: (H,) the weight that the rows took from these sums, and the one that is left; both begin as 0 and 1.
        new: (H, D) the sums over the rows alone.
    """
    for h in range(exact.shape[0]):
        decay = exact_decay(lost[h], left[h])
        lost[h], left[h] = ZERO, ONE
        for d in range(exact.shape[1]):
            exact[h, d] = decay * exact[h, d] + new[h, d]
            rounded[h, d] = np.float32(exact[h, d])
            new[h, d] = ZERO
