"""CPU kernels of the prefix softmax over the whole past: backward, descending in time.

With the weights of the forward pass, which says y_t = g_t m_t + o_t v_t, and n_t the share of the null token,

    S_t = g_t dy_t + a_(t+1) S_(t+1)            dv_t = w_t S_t + o_t dy_t
    z_t = S_t . (v_t - m_(t-1))                 p_t = dy_t . (v_t - m_t)
    C_t = g_t (n_t dy_t . m_t - o_t p_t) + a_(t+1) (C_(t+1) - w_(t+1) z_(t+1))
    dl_t = w_t (a_t z_t + C_t)                  down_t = o_t (g_t p_t + n_t dy_t . v_t)

C_t is the sum of what S_t sums, times how far the mean m_t is from the y of that position. So tokens are compared with
means component by component, and where one token has nearly all the weight the differences are 0, not what is left of
two large sums. The means are not stored but for one in ROWS: they are computed again from there, in float32.

Threads: as forward. The gradient of the state is S and C before the first position.
"""

from typing import Any

import numpy as np
from numba import carray, njit

from multilin.ops.prefix_softmax.cpu_global_forward import checkpoint, piece_bounds, plane, summary
from multilin.ops.prefix_softmax.cpu_math import DOTS, ONE, SCALARS, ZERO, floats, narrow, row, widen
from multilin.ops.prefix_softmax.cpu_task import ROWS


@njit(**SCALARS)
def next_mean(mean: Any, before: Any, v: Any, w: Any, a: Any) -> None:
    """m_t = a_t m_(t-1) + w_t v_t."""
    for h in range(mean.shape[0]):
        weight, decay = w[h], a[h]
        for d in range(mean.shape[1]):
            mean[h, d] = decay * before[h, d] + weight * widen(v[h, d])


@njit(**SCALARS)
def compute_means(task: Any, values: Any, b: int, first: int, n: int, means: Any) -> None:
    """means[0] is m before row `first`, a checkpoint, and means[i + 1] that of row first + i."""
    means[0] = checkpoint(task, b, first // ROWS)
    w, a = plane(task, b, 0, first, n), plane(task, b, 1, first, n)
    p_values, values_row = task.values + task.values_batch * b, task.values_row
    for i in range(n):
        v = row(values, p_values + values_row * (first + i), task.num_heads, task.width)
        next_mean(means[i + 1], means[i], v, w[i], a[i])


@njit(**DOTS)
def back_row(S: Any, C: Any, before: Any, v: Any, dy: Any, dv: Any, w: Any, a: Any, dlogits: Any) -> None:
    """One position backward where y = m. S and C come from the later ones, and go on to the earlier ones, times a.

    Heads descend like time: the other order costs twice the time.
    """
    for h in range(S.shape[0] - 1, -1, -1):
        weight, decay, z = w[h], a[h], ZERO
        for d in range(S.shape[1]):
            s = S[h, d] + widen(dy[h, d])
            z += s * (widen(v[h, d]) - before[h, d])
            dv[h, d] = narrow(weight * s, dv[h, d])
            S[h, d] = decay * s
        dlogits[h] = weight * (decay * z + C[h])
        C[h] = decay * (C[h] - weight * z)


@njit(**DOTS)
def gated_back_row(
    S: Any, C: Any, before: Any, mean: Any, v: Any, dy: Any, dv: Any, w: Any, a: Any, g: Any, o: Any, null: Any,
    dlogits: Any, down: Any,
) -> None:  # fmt: skip
    """As `back_row`, with an own term and a null token."""
    for h in range(S.shape[0] - 1, -1, -1):
        weight, decay, past, own, z, p, of_mean = w[h], a[h], g[h], o[h], ZERO, ZERO, ZERO
        for d in range(S.shape[1]):
            gradient, x, m = widen(dy[h, d]), widen(v[h, d]), mean[h, d]
            s = S[h, d] + past * gradient
            z += s * (x - before[h, d])
            p += gradient * (x - m)
            of_mean += gradient * m
            dv[h, d] = narrow(weight * s + own * gradient, dv[h, d])
            S[h, d] = decay * s
        c = C[h] + past * (null[h] * of_mean - own * p)
        dlogits[h] = weight * (decay * z + c)
        C[h] = decay * (c - weight * z)
        down[h] = own * (past * p + null[h] * (p + of_mean))


@njit(**SCALARS)
def backward_rows(task: Any, values: Any, b: int, first: int, last: int, S: Any, C: Any) -> None:
    """Gradients of positions first <= t < last, from S and C of the later ones, which are moved on."""
    num_heads, width, is_gated = task.num_heads, task.width, task.is_gated != 0
    means, unused = np.empty((ROWS + 1, num_heads, width), np.float32), np.empty(num_heads, np.float32)
    p_values, p_dmeans = task.values + task.values_batch * b, task.dmeans + task.dmeans_batch * b
    p_dvalues = task.dvalues + task.dvalues_batch * b
    values_row, dmeans_row, dvalues_row = task.values_row, task.dmeans_row, task.dvalues_row
    for c in range((last - 1) // ROWS, first // ROWS - 1, -1):
        s = c * ROWS
        n = min(ROWS, last - s)
        compute_means(task, values, b, s, n, means)
        p_scalars = 4 * (b * task.num_time + s) * num_heads
        dlogits = floats(task.dlogits + p_scalars, n, num_heads)
        w, a = plane(task, b, 0, s, n), plane(task, b, 1, s, n)
        for i in range(n - 1, -1, -1):
            v = row(values, p_values + values_row * (s + i), num_heads, width)
            dy = row(values, p_dmeans + dmeans_row * (s + i), num_heads, width)
            dv = row(values, p_dvalues + dvalues_row * (s + i), num_heads, width)
            if is_gated:
                g, o, null = (
                    plane(task, b, 2, s + i, 1)[0],
                    plane(task, b, 3, s + i, 1)[0],
                    plane(task, b, 4, s + i, 1)[0],
                )
                down = floats(task.down + p_scalars, n, num_heads)[i] if task.down != 0 else unused
                gated_back_row(S, C, means[i], means[i + 1], v, dy, dv, w[i], a[i], g, o, null, dlogits[i], down)
            else:
                back_row(S, C, means[i], v, dy, dv, w[i], a[i], dlogits[i])


@njit(**DOTS)
def gather_row(
    S: Any, C: Any, through: Any, before: Any, mean: Any, v: Any, dy: Any, w: Any, a: Any, g: Any, o: Any, null: Any
) -> None:
    """`gated_back_row` without results: only S, C and what is left of what came from the later positions."""
    for h in range(S.shape[0] - 1, -1, -1):
        weight, decay, past, z, p, of_mean = w[h], a[h], g[h], ZERO, ZERO, ZERO
        for d in range(S.shape[1]):
            gradient, x, m = widen(dy[h, d]), widen(v[h, d]), mean[h, d]
            s = S[h, d] + past * gradient
            z += s * (x - before[h, d])
            p += gradient * (x - m)
            of_mean += gradient * m
            S[h, d] = decay * s
        c = C[h] + past * (null[h] * of_mean - o[h] * p)
        C[h] = decay * (c - weight * z)
        through[h] *= decay


def summarize(tasks: Any, values: Any, index: int, sources: Any) -> None:
    """Phase 1, for text and piece `index`, counted from the second part: S and C without the later pieces."""
    task = carray(tasks, (1,))[0]
    num_heads, width, num_pieces = task.num_heads, task.width, task.num_parts * task.num_parts
    summarized = num_pieces - task.num_parts
    b, piece = index // summarized, index % summarized + task.num_parts
    numbers, S = summary(task, b, piece)
    S[:] = ZERO
    numbers[0] = ZERO
    numbers[1] = ONE
    means = np.empty((ROWS + 1, num_heads, width), np.float32)
    all_past, nothing = np.ones(num_heads, np.float32), np.zeros(num_heads, np.float32)
    p_values, p_dmeans = task.values + task.values_batch * b, task.dmeans + task.dmeans_batch * b
    first, last = piece_bounds(task.num_time, num_pieces, piece)
    for c in range((last - 1) // ROWS, first // ROWS - 1, -1):
        s = c * ROWS
        n = min(ROWS, last - s)
        compute_means(task, values, b, s, n, means)
        w, a = plane(task, b, 0, s, n), plane(task, b, 1, s, n)
        for i in range(n - 1, -1, -1):
            v = row(values, p_values + task.values_row * (s + i), num_heads, width)
            dy = row(values, p_dmeans + task.dmeans_row * (s + i), num_heads, width)
            g, o, null = all_past, nothing, nothing
            if task.is_gated:
                g, o, null = (
                    plane(task, b, 2, s + i, 1)[0],
                    plane(task, b, 3, s + i, 1)[0],
                    plane(task, b, 4, s + i, 1)[0],
                )
            gather_row(S, numbers[0], numbers[1], means[i], means[i + 1], v, dy, w[i], a[i], g, o, null)


@njit(**DOTS)
def absorb(task: Any, b: int, piece: int, S: Any, C: Any) -> None:
    """Move S and C on by a piece of time: what C compares with moves from the mean after it to the one before it."""
    numbers, piece_S = summary(task, b, piece)
    num_pieces = task.num_parts * task.num_parts
    first, last = piece_bounds(task.num_time, num_pieces, piece)
    if first == last:
        return
    before = checkpoint(task, b, first // ROWS)
    after = checkpoint(task, b, (last + ROWS - 1) // ROWS)
    for h in range(task.num_heads):
        through, moved = numbers[1, h], ZERO
        for d in range(task.width):
            moved += S[h, d] * (before[h, d] - after[h, d])
            S[h, d] = piece_S[h, d] + through * S[h, d]
        C[h] = numbers[0, h] + through * (C[h] + moved)


@njit(**SCALARS)
def read_dfinal(task: Any, b: int, S: Any, C: Any) -> None:
    """The gradient of the summary token after the last position."""
    S[:] = ZERO
    C[:] = ZERO
    if task.dfinal_logits != 0:
        size = 4 * task.num_heads * task.width
        S[:] = floats(task.dfinal_values + size * b, task.num_heads, task.width)
        C[:] = floats(task.dfinal_logits, task.num_batch, task.num_heads)[b]


def backward(tasks: Any, values: Any, index: int, sources: Any) -> None:
    """Gradients of text and part `index` (phase 2, if there are parts)."""
    task = carray(tasks, (1,))[0]
    num_parts, num_heads, size = task.num_parts, task.num_heads, 4 * task.num_heads * task.width
    b, part = index // num_parts, index % num_parts
    S, C = np.empty((num_heads, task.width), np.float32), np.empty(num_heads, np.float32)
    read_dfinal(task, b, S, C)
    for piece in range(num_parts * num_parts - 1, (part + 1) * num_parts - 1, -1):
        absorb(task, b, piece, S, C)
    first, _ = piece_bounds(task.num_time, num_parts * num_parts, part * num_parts)
    _, last = piece_bounds(task.num_time, num_parts * num_parts, (part + 1) * num_parts - 1)
    backward_rows(task, values, b, first, last, S, C)
    if task.dstate_logits != 0 and part == 0:
        floats(task.dstate_values + size * b, num_heads, task.width)[:] = S
        floats(task.dstate_logits, task.num_batch, num_heads)[b] = C
