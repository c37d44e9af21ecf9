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
def later_row(
    later: Any, later_dots: Any, dy: Any, dots: Any, turn: int, decay: Any, before: int, shares: Any, t: int, r: int
) -> None:
    """B_r = b_(r-1) B_(r-1) + h_t dy_t, with the decay of row `before` and the share of row t; RB_r alike."""
    _, H, D = later.shape
    for h in range(H):
        a, s, new = decay[before, h], shares[t, h], (r * H + h) * D
        for d in range(D):
            B_r = a * get(later, new - H * D + d, LATER) + s * get(dy, h * D + d, DMEANS)
            put(later, new + d, B_r, LATER)
        later_dots[r, h] = a * later_dots[r - 1, h] + s * dots[turn, r - 1, h]


@njit(forceinline=True, **DOTS)
def back_row(
    S: Any, later: Any, R: Any, later_dots: Any, v: Any, y: Any, dy: Any, dv: Any, w: Any, a: Any, u: Any, g: Any,
    dots: Any, turn: int, dlogits: Any, t: int, r: int,
) -> None:  # fmt: skip
    """Position t backward, row r of its block. S (A above) and R come from later positions, and go on times a."""
    H, D = S.shape
    B_r = r * H * D
    for h in range(H - 1, -1, -1):
        weight, decay, other, share, q, dot = w[t, h], a[t, h], u[t, h], g[t, h], ZERO, ZERO
        for k in range(h * D, h * D + D):
            gradient = get(dy, k, DMEANS)
            dot += gradient * get(y, k, MEANS)
            s = get(S, k, RUNNING) + share * gradient
            z = weight * s + other * get(later, B_r + k, LATER)
            q += z * get(v, k, VALUES)
            put(dv, k, z, DVALUES)
            put(S, k, decay * s, RUNNING)
        dots[turn, r, h] = dot
        total = R[h] + share * dot
        dlogits[t, h] = q - (weight * total + other * later_dots[r, h])
        R[h] = decay * total


@njit(forceinline=True, **DOTS)
def full_back_row(
    S: Any, later: Any, R: Any, later_dots: Any, v: Any, y: Any, rounding: Any, dy: Any, dv: Any, w: Any, a: Any,
    u: Any, g: Any, o: Any, has_own: bool, has_rounding: bool, dots: Any, turn: int, dlogits: Any, down: Any, t: int,
    r: int,
) -> None:  # fmt: skip
    """As `back_row`, with an own term, if there is one, and with what y lost by rounding, if that is known."""
    H, D = S.shape
    B_r, lost = r * H * D, ONE if has_rounding else ZERO
    for h in range(H - 1, -1, -1):
        weight, decay, other, share, own = w[t, h], a[t, h], u[t, h], g[t, h], o[t, h] if has_own else ZERO
        q, dot, of_own = ZERO, ZERO, ZERO
        for k in range(h * D, h * D + D):
            x, gradient = get(v, k, VALUES), get(dy, k, DMEANS)
            dot += gradient * (get(y, k, MEANS) + lost * get(rounding, k, ROUNDING))
            s = get(S, k, RUNNING) + share * gradient
            z = weight * s + other * get(later, B_r + k, LATER)
            q += z * x
            of_own += x * gradient
            put(dv, k, z + own * gradient, DVALUES)
            put(S, k, decay * s, RUNNING)
        dots[turn, r, h] = dot
        total = R[h] + share * dot
        dlogits[t, h] = q - (weight * total + other * later_dots[r, h])
        R[h] = decay * total
        if has_own:
            down[t, h] = own * (of_own - dot)


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


@njit(forceinline=True, **DOTS)
def gather_later(
    task: Any, values: Any, b: int, first: int, later: Any, later_dots: Any, dots: Any, turn: int, none: Any
) -> None:
    """B_r and RB_r of the block at `first`, from gradients of the one after it, whose dots these are; row 0 is 0."""
    num_heads, width, k, num_time = task.num_heads, task.width, task.window, task.num_time
    decay, shares = plane(task, b, B, 0, num_time), plane(task, b, H, 0, num_time)
    p_dmeans, dmeans_row = task.dmeans + task.dmeans_batch * b, task.dmeans_row
    for r in range(1, k):
        t = first + k + r - 1
        if t < num_time:
            dy = row(values, p_dmeans + dmeans_row * t, num_heads, width)
            later_row(later, later_dots, dy, dots, turn, decay, first + r - 1, shares, t, r)
        else:
            # Past the end of the last block there is nothing to add: any row times 0.
            dy = row(values, p_dmeans, num_heads, width)
            later_row(later, later_dots, dy, dots, turn, decay, first + r - 1, none, 0, r)


@njit(forceinline=True, **DOTS)
def backward_block(
    task: Any, values: Any, b: int, first: int, S: Any, R: Any, later: Any, later_dots: Any, dots: Any, turn: int
) -> None:
    """Gradients of the block at `first`."""
    num_heads, width, num_time = task.num_heads, task.width, task.num_time
    w, a, u = plane(task, b, W, 0, num_time), plane(task, b, A, 0, num_time), plane(task, b, U, 0, num_time)
    g, o = plane(task, b, G, 0, num_time), plane(task, b, OWN, 0, num_time)
    p_scalars = 4 * b * num_time * num_heads
    dlogits, down = (
        floats(task.dlogits + p_scalars, num_time, num_heads),
        floats(task.down + p_scalars, num_time, num_heads),
    )
    p_values, p_dmeans = task.values + task.values_batch * b, task.dmeans + task.dmeans_batch * b
    p_means, p_dvalues = task.means + task.means_batch * b, task.dvalues + task.dvalues_batch * b
    values_row, dmeans_row, means_row, dvalues_row = task.values_row, task.dmeans_row, task.means_row, task.dvalues_row
    p_rounding = p_means if task.rounding == 0 else task.rounding + task.means_batch * b
    has_own, has_rounding = task.own != 0, task.rounding != 0
    for t in range(min(first + task.window, num_time) - 1, first - 1, -1):
        v = row(values, p_values + values_row * t, num_heads, width)
        y = row(values, p_means + means_row * t, num_heads, width)
        dy = row(values, p_dmeans + dmeans_row * t, num_heads, width)
        dv = row(values, p_dvalues + dvalues_row * t, num_heads, width)
        r = t - first
        if has_own or has_rounding:
            rounding = row(values, p_rounding + means_row * t, num_heads, width)
            full_back_row(
                S, later, R, later_dots, v, y, rounding, dy, dv, w, a, u, g, o, has_own, has_rounding, dots, turn,
                dlogits, down, t, r,
            )  # fmt: skip
        else:
            back_row(S, later, R, later_dots, v, y, dy, dv, w, a, u, g, dots, turn, dlogits, t, r)


def backward(tasks: Any, values: Any, index: int, sources: Any) -> None:
    """Gradients of text and part `index`."""
    task = carray(tasks, (1,))[0]
    num_heads, width, k, num_time = task.num_heads, task.width, task.window, task.num_time
    b, part = index // task.num_parts, index % task.num_parts
    first, last = part_bounds(task, part)
    # The weight a of the first token of a block is 0: it forgets S and R of the block after it.
    S, R = np.zeros((num_heads, width), np.float32), np.zeros(num_heads, np.float32)
    later, later_dots = np.zeros((k, num_heads, width), np.float32), np.zeros((k, num_heads), np.float32)
    dots, none, turn = np.zeros((2, k, num_heads), np.float32), np.zeros((1, num_heads), np.float32), 0
    if last < num_time and first < last:
        compute_dots(task, values, b, last, min(k, num_time - last), dots[1])
    for t in range((last - 1) // k * k, first - 1, -k):
        if t + k < num_time:
            gather_later(task, values, b, t, later, later_dots, dots, 1 - turn, none)
        backward_block(task, values, b, t, S, R, later, later_dots, dots, turn)
        turn = 1 - turn
