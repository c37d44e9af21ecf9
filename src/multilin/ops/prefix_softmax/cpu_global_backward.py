"""CPU kernels of the prefix softmax over the whole past: backward, descending in time.

With the weights of the forward pass, which says y_t = g_t m_t + o_t v_t, and n_t the share of the null token,

    S_t = g_t dy_t + a_(t+1) S_(t+1)            dv_t = w_t S_t + o_t dy_t
    z_t = S_t . (v_t - m_(t-1))                 p_t = dy_t . (v_t - m_t)
    C_t = g_t (n_t dy_t . m_t - o_t p_t) + a_(t+1) (C_(t+1) - w_(t+1) z_(t+1))
    dl_t = w_t (a_t z_t + C_t)                  down_t = o_t (g_t p_t + n_t dy_t . v_t)

C_t is the sum of what S_t sums, times how far the mean m_t is from the y of that position. So tokens are compared with
means component by component, and where one token has nearly all the weight the differences are 0, not what is left of
two large sums. Without own term and null token y is the mean, and is read. Else the means are not stored but for one
in ROWS: they are computed again from there, in float32.

Threads: as forward. The gradient of the state is S and C before the first position.
"""

from typing import Any

import numpy as np
from numba import carray, njit

from multilin.ops.prefix_softmax.cpu_global_forward import checkpoint, piece_bounds, plane, summary
from multilin.ops.prefix_softmax.cpu_math import (
    DMEANS,
    DOTS,
    DVALUES,
    MEANS,
    ONE,
    RUNNING,
    SCALARS,
    VALUES,
    ZERO,
    assign,
    floats,
    get,
    put,
    row,
)
from multilin.ops.prefix_softmax.cpu_task import ROWS


@njit(**SCALARS)
def weights(task: Any, b: int, first: int, n: int, all_past: Any, nothing: Any) -> Any:
    """w, a, g, o and the null token's share of n rows."""
    w, a = plane(task, b, 0, first, n), plane(task, b, 1, first, n)
    if task.is_gated:
        return w, a, plane(task, b, 2, first, n), plane(task, b, 3, first, n), plane(task, b, 4, first, n)
    return w, a, all_past, nothing, nothing


@njit(forceinline=True, **SCALARS)
def next_mean(means: Any, v: Any, w: Any, a: Any, i: int) -> None:
    """m_t = a_t m_(t-1) + w_t v_t."""
    _, H, D = means.shape
    for h in range(H):
        weight, decay, old = w[i, h], a[i, h], (i * H + h) * D
        for d in range(D):
            m = decay * get(means, old + d, MEANS) + weight * get(v, h * D + d, VALUES)
            put(means, old + H * D + d, m, MEANS)


@njit(**SCALARS)
def compute_means(task: Any, values: Any, b: int, first: int, n: int, means: Any) -> None:
    """means[0] is m before row `first`, a checkpoint, and means[i + 1] that of row first + i."""
    assign(means[0], checkpoint(task, b, first // ROWS))
    w, a = plane(task, b, 0, first, n), plane(task, b, 1, first, n)
    p_values, values_row = task.values + task.values_batch * b, task.values_row
    for i in range(n):
        v = row(values, p_values + values_row * (first + i), task.num_heads, task.width)
        next_mean(means, v, w, a, i)


@njit(forceinline=True, **DOTS)
def back_row(S: Any, C: Any, before: Any, v: Any, dy: Any, dv: Any, w: Any, a: Any, dlogits: Any, i: int) -> None:
    """One position backward where y = m. S and C come from the later ones, and go on to the earlier ones, times a.

    Heads descend like time: the other order costs twice the time.
    """
    H, D = S.shape
    for h in range(H - 1, -1, -1):
        weight, decay, z = w[i, h], a[i, h], ZERO
        for k in range(h * D, h * D + D):
            s = get(S, k, RUNNING) + get(dy, k, DMEANS)
            z += s * (get(v, k, VALUES) - get(before, k, MEANS))
            put(dv, k, weight * s, DVALUES)
            put(S, k, decay * s, RUNNING)
        dlogits[i, h] = weight * (decay * z + C[h])
        C[h] = decay * (C[h] - weight * z)


@njit(forceinline=True, **DOTS)
def gated_back_row(
    S: Any, C: Any, means: Any, v: Any, dy: Any, dv: Any, w: Any, a: Any, g: Any, o: Any, null: Any,
    dlogits: Any, down: Any, i: int,
) -> None:  # fmt: skip
    """As `back_row`, with an own term and a null token."""
    H, D = S.shape
    for h in range(H - 1, -1, -1):
        weight, decay, past, own, z, p, of_mean = w[i, h], a[i, h], g[i, h], o[i, h], ZERO, ZERO, ZERO
        before, after = i * H * D, (i + 1) * H * D
        for k in range(h * D, h * D + D):
            gradient, x, m = get(dy, k, DMEANS), get(v, k, VALUES), get(means, after + k, MEANS)
            s = get(S, k, RUNNING) + past * gradient
            z += s * (x - get(means, before + k, MEANS))
            p += gradient * (x - m)
            of_mean += gradient * m
            put(dv, k, weight * s + own * gradient, DVALUES)
            put(S, k, decay * s, RUNNING)
        c = C[h] + past * (null[i, h] * of_mean - own * p)
        dlogits[i, h] = weight * (decay * z + c)
        C[h] = decay * (c - weight * z)
        down[i, h] = own * (past * p + null[i, h] * (p + of_mean))


@njit(**SCALARS)
def backward_rows(task: Any, values: Any, b: int, first: int, last: int, S: Any, C: Any) -> None:
    """Gradients of positions first <= t < last, from S and C of the later ones, which are moved on."""
    num_heads, width, is_gated = task.num_heads, task.width, task.is_gated != 0
    means, unused = np.empty((ROWS + 1, num_heads, width), np.float32), np.empty((ROWS, num_heads), np.float32)
    all_past, nothing = np.ones((ROWS, num_heads), np.float32), np.zeros((ROWS, num_heads), np.float32)
    p_values, p_dmeans = task.values + task.values_batch * b, task.dmeans + task.dmeans_batch * b
    p_dvalues, p_means = task.dvalues + task.dvalues_batch * b, task.means + task.means_batch * b
    values_row, dmeans_row, dvalues_row = task.values_row, task.dmeans_row, task.dvalues_row
    means_row = task.means_row
    for c in range((last - 1) // ROWS, first // ROWS - 1, -1):
        s = c * ROWS
        n = min(ROWS, last - s)
        if is_gated:
            compute_means(task, values, b, s, n, means)
        p_scalars = 4 * (b * task.num_time + s) * num_heads
        dlogits = floats(task.dlogits + p_scalars, n, num_heads)
        w, a, g, o, null = weights(task, b, s, n, all_past, nothing)
        down = floats(task.down + p_scalars, n, num_heads) if task.down != 0 else unused
        for i in range(n - 1, -1, -1):
            v = row(values, p_values + values_row * (s + i), num_heads, width)
            dy = row(values, p_dmeans + dmeans_row * (s + i), num_heads, width)
            dv = row(values, p_dvalues + dvalues_row * (s + i), num_heads, width)
            if is_gated:
                gated_back_row(S, C, means, v, dy, dv, w, a, g, o, null, dlogits, down, i)
            elif s + i > 0:
                before = row(values, p_means + means_row * (s + i - 1), num_heads, width)
                back_row(S, C, before, v, dy, dv, w, a, dlogits, i)
            else:
                back_row(S, C, checkpoint(task, b, 0), v, dy, dv, w, a, dlogits, i)


@njit(forceinline=True, **DOTS)
def gather_row(
    S: Any,
    C: Any,
    through: Any,
    means: Any,
    v: Any,
    dy: Any,
    w: Any,
    a: Any,
    g: Any,
    o: Any,
    null: Any,
    i: int,
) -> None:
    """`gated_back_row` without results: only S, C and what is left of what came from the later positions."""
    H, D = S.shape
    for h in range(H - 1, -1, -1):
        weight, decay, past, z, p, of_mean = w[i, h], a[i, h], g[i, h], ZERO, ZERO, ZERO
        before, after = i * H * D, (i + 1) * H * D
        for k in range(h * D, h * D + D):
            gradient, x, m = get(dy, k, DMEANS), get(v, k, VALUES), get(means, after + k, MEANS)
            s = get(S, k, RUNNING) + past * gradient
            z += s * (x - get(means, before + k, MEANS))
            p += gradient * (x - m)
            of_mean += gradient * m
            put(S, k, decay * s, RUNNING)
        c = C[h] + past * (null[i, h] * of_mean - o[i, h] * p)
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
    all_past, nothing = np.ones((ROWS, num_heads), np.float32), np.zeros((ROWS, num_heads), np.float32)
    p_values, p_dmeans = task.values + task.values_batch * b, task.dmeans + task.dmeans_batch * b
    first, last = piece_bounds(task.num_time, num_pieces, piece)
    for c in range((last - 1) // ROWS, first // ROWS - 1, -1):
        s = c * ROWS
        n = min(ROWS, last - s)
        compute_means(task, values, b, s, n, means)
        w, a, g, o, null = weights(task, b, s, n, all_past, nothing)
        for i in range(n - 1, -1, -1):
            v = row(values, p_values + task.values_row * (s + i), num_heads, width)
            dy = row(values, p_dmeans + task.dmeans_row * (s + i), num_heads, width)
            gather_row(S, numbers[0], numbers[1], means, v, dy, w, a, g, o, null, i)


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
        assign(S, floats(task.dfinal_values + size * b, task.num_heads, task.width))
        dlogits = floats(task.dfinal_logits, task.num_batch, task.num_heads)
        for h in range(task.num_heads):
            C[h] = dlogits[b, h]


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
        assign(floats(task.dstate_values + size * b, num_heads, task.width), S)
        dlogits = floats(task.dstate_logits, task.num_batch, num_heads)
        for h in range(num_heads):
            dlogits[b, h] = C[h]
