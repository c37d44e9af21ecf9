"""Running sums over a long text in the CPU kernels: pieces of time, and sums whose rounding errors do not add up.

A float32 sum s_t = a_t s_(t-1) + w_t v_t would be rounded at every position. So within a block of ROWS positions, s_t
is computed as f_t s + n_t: s is the sum before the block, f_t the product of the block's a up to t, and n_t the sum
over the block's tokens. s itself is in float64, and updated once per block.
"""

import numpy as np
from numba import njit

from multilin.ops.kernels.cpu_intrinsics import ONE, SCALARS, ZERO, floats
from multilin.ops.prefix_softmax.cpu import ROWS

PAGE, HALF = 4096, np.float32(0.5)  # bytes of a page of memory; a weight


@njit
def zeros_beside(address, num_heads, width):
    """Two arrays of zeros (H, D), one after the other; their address has the same last 12 bits as `address`.

    Processors first compare only these bits, so stores at other offsets in a page may delay loads of rows: if the
    allocator places the arrays at such an offset, the backward pass takes 1.2 times as long.
    """
    size = 2 * num_heads * width
    room = np.zeros(size + PAGE // 4, np.float32)
    first = (address - room.ctypes.data) % PAGE // 4
    both = room[first : first + size].reshape((2, num_heads, width))
    return both[0], both[1]


@njit
def assign(target, source):
    """Copy a matrix. `target[:] = source` can raise, and compiling the error message takes longer than all the rest."""
    for i in range(source.shape[0]):
        for j in range(source.shape[1]):
            target[i, j] = source[i, j]


@njit
def piece_bounds(task, piece):
    """First position of a piece of time, and the position after its last: multiples of ROWS, or the text's end."""
    chunks, num_pieces = (task.num_time + ROWS - 1) // ROWS, task.num_parts * task.num_parts
    return chunks * piece // num_pieces * ROWS, min(task.num_time, chunks * (piece + 1) // num_pieces * ROWS)


@njit
def summary(task, piece):
    """The arrays that hold the summary of a piece of time: numbers (3, H) and vectors (H, D)."""
    address = task.summaries + 4 * piece * task.num_heads * (3 + task.width)
    return floats(address, 3, task.num_heads), floats(address + 12 * task.num_heads, task.num_heads, task.width)


@njit
def checkpoint(task, chunk):
    """The mean (H, D) before position chunk * ROWS; for the last `chunk`, the mean after the last position."""
    return floats(task.checkpoints + 4 * task.num_heads * task.width * chunk, task.num_heads, task.width)


@njit(**SCALARS)
def exact_decay(lost, left):
    """The weight `left` in float64; above 0.5 computed as 1 - lost, because float32 is too coarse near 1."""
    return 1.0 - lost if left > HALF else np.float64(left)


@njit(**SCALARS)
def move_on(exact, lost, left, new, rounded):
    """After some rows, set exact = left exact + new, copy it to `rounded`, and reset `lost`, `left` and `new`.

    Args:
        exact, rounded: (H, D) the sums before the rows, in float64 and float32.
        lost, left: (H,) the weight that these sums lost in the rows, and the weight left; they begin as 0 and 1.
        new: (H, D) the sums over the rows alone.
    """
    for h in range(exact.shape[0]):
        decay = exact_decay(lost[h], left[h])
        lost[h], left[h] = ZERO, ONE
        for d in range(exact.shape[1]):
            exact[h, d] = decay * exact[h, d] + new[h, d]
            rounded[h, d] = np.float32(exact[h, d])
            new[h, d] = ZERO
