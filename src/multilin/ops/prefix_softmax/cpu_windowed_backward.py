"""CPU kernels of the prefix softmax over a window of k tokens: backward, block by block from the last one.

With the weights of the forward pass and r_t = dy_t . y_t, block c being that of t, r the offset of t in it,

    A_t = g_t dy_t + a_(t+1) A_(t+1)                              descending in block c
    B_r = b_(r-1) B_(r-1) + h_s dy_s, s: offset r - 1 of block c + 1    ascending
    dv_t = w_t A_t + u_t B_r + o_t dy_t        dl_t = v_t . (w_t A_t + u_t B_r) - (w_t RA_t + u_t RB_r)

RA, RB: the same with g r and h r. It is the forward network read from its end, so every factor is in [0, 1].
"""

from typing import Any

import numpy as np
from numba import carray, njit

from multilin.ops.prefix_softmax.cpu_math import (
    DMEANS,
    DOTS,
    DVALUES,
    LATER,
    MEANS,
    ONE,
    ROUNDING,
    RUNNING,
    VALUES,
    ZERO,
    floats,
    get,
    put,
    row,
)
from multilin.ops.prefix_softmax.cpu_windowed_forward import OWN, A, B, G, H, U, W, part_bounds, plane


@njit(forceinline=True, **DOTS)
def dot_row(dy: Any, y: Any, dot: Any, i: int) -> None:
    """r = dy . y of every head."""
    H, D = y.shape
    for h in range(H):
        r = ZERO
        for k in range(h * D, h * D + D):
            r += get(dy, k, DMEANS) * get(y, k, MEANS)
        dot[i, h] += r


@njit(forceinline=True, **DOTS)
def later_row(later: Any, dy: Any, decay: Any, share: Any, i: int) -> None:
    """B_r = b_(r-1) B_(r-1) + h_t dy_t."""
    _, H, D = later.shape
    for h in range(H):
        a, s, new = decay[i - 1, h], share[h], (i * H + h) * D
        for d in range(D):
            B_r = a * get(later, new - H * D + d, LATER) + s * get(dy, h * D + d, DMEANS)
            put(later, new + d, B_r, LATER)


@njit(forceinline=True, **DOTS)
def back_row(
    S: Any, later: Any, R: Any, later_dots: Any, v: Any, y: Any, dy: Any, dv: Any, w: Any, a: Any, u: Any, g: Any,
    dot: Any, dlogits: Any, i: int,
) -> None:  # fmt: skip
    """One position backward. S (A above) and R come from the later positions of the block, and go on times a."""
    H, D = S.shape
    B_r = i * H * D
    for h in range(H - 1, -1, -1):
        weight, decay, other, share, q, r = w[i, h], a[i, h], u[i, h], g[i, h], ZERO, ZERO
        for k in range(h * D, h * D + D):
            gradient = get(dy, k, DMEANS)
            r += gradient * get(y, k, MEANS)
            s = get(S, k, RUNNING) + share * gradient
            z = weight * s + other * get(later, B_r + k, LATER)
            q += z * get(v, k, VALUES)
            put(dv, k, z, DVALUES)
            put(S, k, decay * s, RUNNING)
        dot[i, h] = r
        total = R[h] + share * r
        dlogits[i, h] = q - (weight * total + other * later_dots[i, h])
        R[h] = decay * total


@njit(forceinline=True, **DOTS)
def full_back_row(
    S: Any, later: Any, R: Any, later_dots: Any, v: Any, y: Any, rounding: Any, dy: Any, dv: Any, w: Any, a: Any,
    u: Any, g: Any, o: Any, lost: float, dot: Any, dlogits: Any, down: Any, i: int,
) -> None:  # fmt: skip
    """As `back_row`, with an own term and what y lost by rounding; what is not there has weight 0 in o and lost."""
    H, D = S.shape
    B_r = i * H * D
    for h in range(H - 1, -1, -1):
        weight, decay, other, share, own = w[i, h], a[i, h], u[i, h], g[i, h], o[i, h]
        q, r, of_own = ZERO, ZERO, ZERO
        for k in range(h * D, h * D + D):
            x, gradient = get(v, k, VALUES), get(dy, k, DMEANS)
            r += gradient * (get(y, k, MEANS) + lost * get(rounding, k, ROUNDING))
            s = get(S, k, RUNNING) + share * gradient
            z = weight * s + other * get(later, B_r + k, LATER)
            q += z * x
            of_own += x * gradient
            put(dv, k, z + own * gradient, DVALUES)
            put(S, k, decay * s, RUNNING)
        dot[i, h] = r
        total = R[h] + share * r
        dlogits[i, h] = q - (weight * total + other * later_dots[i, h])
        down[i, h] = own * (of_own - r)
        R[h] = decay * total


@njit(**DOTS)
def compute_dots(task: Any, values: Any, b: int, first: int, num_rows: int, dots: Any) -> None:
    """r = dy . y of rows from `first`, with what y lost by rounding if that is there."""
    num_heads, width = task.num_heads, task.width
    dots[:] = ZERO
    for i in range(num_rows):
        dy = row(values, task.dmeans + task.dmeans_batch * b + task.dmeans_row * (first + i), num_heads, width)
        offset = task.means_batch * b + task.means_row * (first + i)
        dot_row(dy, row(values, task.means + offset, num_heads, width), dots, i)
        if task.rounding != 0:
            dot_row(dy, row(values, task.rounding + offset, num_heads, width), dots, i)


@njit(**DOTS)
def gather_later(task: Any, values: Any, b: int, first: int, dots: Any, later: Any, later_dots: Any) -> None:
    """B_r and RB_r of the block at `first`, from gradients of the one after it, whose dots these are; row 0 is 0."""
    num_heads, width, k = task.num_heads, task.width, task.window
    num_next = min(k, task.num_time - first - k)
    p_dmeans = task.dmeans + task.dmeans_batch * b
    decay, shares = plane(task, b, B, first, k), plane(task, b, H, first + k, num_next)
    none = np.zeros(num_heads, np.float32)
    for i in range(1, k):
        # Past the end of the last block there is nothing to add: any row times 0.
        t = min(i - 1, num_next - 1)
        share = shares[i - 1] if i <= num_next else none
        dy = row(values, p_dmeans + task.dmeans_row * (first + k + t), num_heads, width)
        later_row(later, dy, decay, share, i)
        for h in range(num_heads):
            later_dots[i, h] = decay[i - 1, h] * later_dots[i - 1, h] + share[h] * dots[t, h]


@njit(**DOTS)
def backward_block(
    task: Any, values: Any, b: int, first: int, n: int, dots: Any, S: Any, R: Any, later: Any, later_dots: Any,
    no_own: Any, unused: Any,
) -> None:  # fmt: skip
    """Gradients of the block at `first`."""
    num_heads, width = task.num_heads, task.width
    w, a, g = plane(task, b, W, first, n), plane(task, b, A, first, n), plane(task, b, G, first, n)
    u = plane(task, b, U, first, n)
    p_values, p_dmeans = task.values + task.values_batch * b, task.dmeans + task.dmeans_batch * b
    p_means, p_dvalues = task.means + task.means_batch * b, task.dvalues + task.dvalues_batch * b
    p_rounding, lost = (p_means, ZERO) if task.rounding == 0 else (task.rounding + task.means_batch * b, ONE)
    is_plain = task.own == 0 and task.rounding == 0
    S[:] = ZERO
    R[:] = ZERO
    p_scalars = 4 * (b * task.num_time + first) * num_heads
    dlogits, o, down = floats(task.dlogits + p_scalars, n, num_heads), no_own, unused
    if task.own != 0:
        o, down = plane(task, b, OWN, first, n), floats(task.down + p_scalars, n, num_heads)
    for i in range(n - 1, -1, -1):
        t = first + i
        v = row(values, p_values + task.values_row * t, num_heads, width)
        y = row(values, p_means + task.means_row * t, num_heads, width)
        dy = row(values, p_dmeans + task.dmeans_row * t, num_heads, width)
        dv = row(values, p_dvalues + task.dvalues_row * t, num_heads, width)
        if is_plain:
            back_row(S, later, R, later_dots, v, y, dy, dv, w, a, u, g, dots, dlogits, i)
        else:
            rounding = row(values, p_rounding + task.means_row * t, num_heads, width)
            full_back_row(
                S, later, R, later_dots, v, y, rounding, dy, dv, w, a, u, g, o, lost, dots, dlogits, down, i
            )  # fmt: skip


def backward(tasks: Any, values: Any, index: int, sources: Any) -> None:
    """Gradients of text and part `index`."""
    task = carray(tasks, (1,))[0]
    num_heads, width, k, num_time = task.num_heads, task.width, task.window, task.num_time
    b, part = index // task.num_parts, index % task.num_parts
    first, last = part_bounds(task, part)
    S, R = np.empty((num_heads, width), np.float32), np.empty(num_heads, np.float32)
    later, later_dots = np.zeros((k, num_heads, width), np.float32), np.zeros((k, num_heads), np.float32)
    dots, next_dots = np.empty((k, num_heads), np.float32), np.empty((k, num_heads), np.float32)
    no_own, unused = np.zeros((k, num_heads), np.float32), np.empty((k, num_heads), np.float32)
    if last < num_time and first < last:
        compute_dots(task, values, b, last, min(k, num_time - last), next_dots)
    for c in range((last + k - 1) // k - 1, first // k - 1, -1):
        t = c * k
        n, has_next = min(k, num_time - t), t + k < num_time
        if has_next:
            gather_later(task, values, b, t, next_dots, later, later_dots)
        backward_block(task, values, b, t, n, dots, S, R, later, later_dots, no_own, unused)
        dots, next_dots = next_dots, dots
