"""CPU kernels of the prefix softmax over a window of k tokens, in time that does not depend on k.

Time is cut into blocks of k (van Herk, Gil-Werman). The window of a position at offset r of block c is a prefix of c,
up to r, and a suffix of block c - 1, from r + 1 on. Prefix means m start anew in every block, with weights w, a (see
`prefix_weights`). Suffix means V go backward through a block, with weights u, b: V_r = b_r V_(r+1) + u_r v_r. Together,

    y_t = g_t m_t + h_t V_(r+1)          g, h: weights of prefix and suffix; 1 - g - h is the null token's

If a text starts in a block, prefixes begin at this start and h = 0; tokens before the block's last start have u = 0, b
= 1.

Backward, block by block from the last one, with d_t = dy_t . y_t:

    A_t = g_t dy_t + a_(t+1) A_(t+1)                                    descending in block c
    B_r = b_(r-1) B_(r-1) + h_s dy_s, s: offset r - 1 of block c + 1    ascending
    dv_t = w_t A_t + u_t B_r        dl_t = v_t . dv_t - (w_t RA_t + u_t RB_r)

RA and RB are A and B with d in place of dy. This is the forward computation in reverse: every factor is in [0, 1].
"""

import numpy as np
from numba import njit

from multilin.ops.kernels.cpu_intrinsics import DOTS, LOWEST, NOTHING, SCALARS, ZERO, floats
from multilin.ops.prefix_softmax.cpu_math import (
    exponentials,
    get,
    merge_weights,
    prefix_weights,
    put,
    raise_top,
    rounded_like,
    row,
    share_out,
    starts_at,
    task_of,
    weights,
)

GROUP = 64  # positions whose weights are computed together; a longer block is one group
W, A, U, B, G, H = range(6)  # kinds of weights


@njit(**SCALARS)
def suffix_weights(task, first, scratch, tops, totals, u, b):
    """Compute u_r = e^(l_r - Q_r), b_r = e^(Q_(r+1) - Q_r) of whole blocks; Q_r: log of the total weight from r on."""
    num_rows, num_heads = tops.shape
    new, old = scratch[0, :num_rows], scratch[1, :num_rows]
    top, total = np.full(num_heads, LOWEST, np.float32), np.zeros(num_heads, np.float64)
    nothing = np.full((1, num_heads), NOTHING, np.float32)
    is_hidden, left = False, 0
    for i in range(num_rows - 1, -1, -1):
        is_last = left == 0
        if is_last:
            left, is_hidden = task.window, False
        left -= 1
        logits = nothing if is_hidden else floats(task.logits + task.logits_row * (first + i), 1, num_heads)
        raise_top(logits, is_last, top, new, old, tops, i)
        is_hidden = is_hidden or starts_at(task, first + i)
    exponentials(new.reshape(new.size))
    exponentials(old.reshape(old.size))
    for i in range(num_rows - 1, -1, -1):
        share_out(total, new, old, totals, u, b, i)


@njit(**SCALARS)
def gate(task, first, before, tops, totals, suffix_tops, suffix_totals, others, g, h):
    """Compute the weights g, h of prefix and suffix from row `first` on; row 0 of the suffixes is position `before`."""
    num_rows, num_heads = g.shape
    other_tops, other_totals = others[0, :num_rows], others[1, :num_rows]
    is_cut, offset = False, 0
    for i in range(num_rows):
        t = first + i
        is_cut = (is_cut and offset != 0) or t < task.window or starts_at(task, t)
        offset = 0 if offset + 1 == task.window else offset + 1
        j = t + 1 - task.window - before
        if is_cut or offset == 0:
            for head in range(num_heads):
                put(other_tops, i * num_heads + head, NOTHING, "other tops")
                put(other_totals, i * num_heads + head, ZERO, "other totals")
        else:
            for head in range(num_heads):
                put(other_tops, i * num_heads + head, get(suffix_tops, j * num_heads + head, "tops"), "other tops")
                total = get(suffix_totals, j * num_heads + head, "totals")
                put(other_totals, i * num_heads + head, total, "other totals")
    merge_weights(tops, totals, other_tops, other_totals, np.float32(task.null), g, h)


@njit(forceinline=True, **SCALARS)
def compute_suffixes(task, values, first, before, u, b, suffix):
    """Set suffix[r], r > 0, to V_r of the block at `first`; row 0 of the weights u, b is position `before`."""
    num_heads, width, k, p_values, values_row = task.num_heads, task.width, task.window, task.values, task.values_row
    for r in range(k - 1, 0, -1):
        v = row(values, p_values + values_row * (first + r), num_heads, width)
        for h in range(num_heads - 1, -1, -1):
            weight, decay, new = u[first + r - before, h], b[first + r - before, h], (r * num_heads + h) * width
            for d in range(width):
                V = decay * get(suffix, new + num_heads * width + d, "later") + weight * get(v, h * width + d, "values")
                put(suffix, new + d, V, "later")


@njit(forceinline=True, **SCALARS)
def mean_row(mean, suffix, v, y, rounding, w, a, g, s, keeps_rounding, i, r):
    """Add a token to the prefix mean, and merge this mean with suffix r + 1 into y."""
    H, D = mean.shape
    later = (r + 1) * H * D
    for h in range(H):
        weight, decay, prefix_weight, suffix_weight = w[i, h], a[i, h], g[i, h], s[i, h]
        for k in range(h * D, h * D + D):
            m = decay * get(mean, k, "running") + weight * get(v, k, "values")
            put(mean, k, m, "running")
            exact = prefix_weight * m + suffix_weight * get(suffix, later + k, "later")
            put(y, k, exact, "means")
            if keeps_rounding:
                put(rounding, k, exact - rounded_like(exact, y), "rounding")


@njit
def part_bounds(task):
    """First position of the part of time, and the position after its last: multiples of the window, or the end."""
    blocks, k, part = (task.num_time + task.window - 1) // task.window, task.window, task.part
    return blocks * part // task.num_parts * k, min(task.num_time, blocks * (part + 1) // task.num_parts * k)


@njit(**SCALARS)
def forward_blocks(task, values, first, before, mean, suffix, w, a, u, b, g, h):
    """Compute the means of blocks from `first` on; row 0 of u and b is position `before`; suffix[k] stays 0."""
    num_heads, width, keeps_rounding = task.num_heads, task.width, task.rounding != 0
    p_values, p_means, p_rounding = task.values, task.means, task.rounding
    values_row, means_row, rounding_row = task.values_row, task.means_row, task.rounding_row
    for start in range(0, w.shape[0], task.window):
        if first + start > 0:
            compute_suffixes(task, values, first + start - task.window, before, u, b, suffix)
        for i in range(start, min(start + task.window, w.shape[0])):
            v = row(values, p_values + values_row * (first + i), num_heads, width)
            y = row(values, p_means + means_row * (first + i), num_heads, width)
            rounding = row(values, p_rounding + rounding_row * (first + i), num_heads, width)
            if keeps_rounding:
                mean_row(mean, suffix, v, y, rounding, w, a, g, h, True, i, i - start)
            else:
                mean_row(mean, suffix, v, y, y, w, a, g, h, False, i, i - start)


def forward(tasks, values, index, sources):
    """Compute the means of the part that `index` selects."""
    task = task_of(tasks, index, False)
    num_heads, k, T = task.num_heads, task.window, task.num_time
    first, last = part_bounds(task)
    group = k * max(1, GROUP // k)
    scratch = np.empty((14, group, num_heads), np.float32)
    mean = np.zeros((num_heads, task.width), np.float32)
    suffix = np.zeros((k + 1, num_heads, task.width), np.float32)
    top, total = np.full(num_heads, LOWEST, np.float32), np.zeros(num_heads, np.float64)
    for s in range(first, last, group):
        n = min(group, last - s)
        before, last_block = max(s - k, 0), s + (n - 1) // k * k
        m = last_block - before
        w, a, g, h = scratch[W, :n], scratch[A, :n], scratch[G, :n], scratch[H, :n]
        u, b = scratch[U, :m], scratch[B, :m]
        tops, totals, suffix_tops, suffix_totals = scratch[6, :n], scratch[7, :n], scratch[8, :m], scratch[9, :m]
        if task.weights != 0:
            w, a = weights(task, W, s, n), weights(task, A, s, n)
            u, b = weights(task, U, before, m), weights(task, B, before, m)
            g, h = weights(task, G, s, n), weights(task, H, s, n)
        prefix_weights(task, k, s, top, total, scratch[10:], tops, totals, w, a)
        suffix_weights(task, before, scratch[10:], suffix_tops, suffix_totals, u, b)
        gate(task, s, before, tops, totals, suffix_tops, suffix_totals, scratch[12:], g, h)
        forward_blocks(task, values, s, before, mean, suffix, w, a, u, b, g, h)
    if task.weights != 0 and last == T:
        # No later block reads the suffixes of the last block.
        last_block = (T - 1) // k * k
        weights(task, U, last_block, T - last_block)[:] = ZERO
        weights(task, B, last_block, T - last_block)[:] = ZERO


@njit(**DOTS)
def compute_dots(task, values, first, num_rows, dots):
    """Compute dy . y of `num_rows` rows from `first` on."""
    num_heads, width = task.num_heads, task.width
    for i in range(num_rows):
        dy = row(values, task.dmeans + task.dmeans_row * (first + i), num_heads, width)
        y = row(values, task.means + task.means_row * (first + i), num_heads, width)
        rounding = row(values, task.rounding + task.rounding_row * (first + i), num_heads, width)
        for h in range(num_heads):
            dot = ZERO
            for k in range(h * width, h * width + width):
                dot += get(dy, k, "dmeans") * get(y, k, "means")
                if task.rounding != 0:
                    dot += get(dy, k, "dmeans") * get(rounding, k, "rounding")
            dots[i, h] = dot


@njit(**DOTS)
def gather_later(task, values, first, later, later_dots, dots):
    """Compute B_r, RB_r of the block at `first` from gradients and `dots` of the next block; row 0 stays 0."""
    num_heads, width, p_dmeans, dmeans_row = task.num_heads, task.width, task.dmeans, task.dmeans_row
    b, h = weights(task, B, 0, task.num_time), weights(task, H, 0, task.num_time)
    for r in range(1, task.window):
        t = first + task.window + r - 1
        # After the last position there is nothing to add: row 0 with weight 0 stands in.
        dy = row(values, p_dmeans + dmeans_row * (t if t < task.num_time else 0), num_heads, width)
        for head in range(num_heads):
            decay, new = b[first + r - 1, head], (r * num_heads + head) * width
            weight = h[t, head] if t < task.num_time else ZERO
            for d in range(width):
                before = decay * get(later, new - num_heads * width + d, "later")
                put(later, new + d, before + weight * get(dy, head * width + d, "dmeans"), "later")
            later_dots[r, head] = decay * later_dots[r - 1, head] + weight * dots[r - 1, head]


@njit(forceinline=True, **DOTS)
def back_row(S, later, R, later_dots, v, y, rounding, dy, dv, w, a, u, g, has_rounding, dots, dlogits, t, r):
    """Compute gradients of position t, row r of its block; multiply S and R, which are A and RA above, by a_t."""
    H, D = S.shape
    B_r = r * H * D
    for h in range(H - 1, -1, -1):
        weight, decay, other, past, q, dot = w[t, h], a[t, h], u[t, h], g[t, h], ZERO, ZERO
        for k in range(h * D, h * D + D):
            gradient, mean = get(dy, k, "dmeans"), get(y, k, "means")
            if has_rounding:
                mean += get(rounding, k, "rounding")
            dot += gradient * mean
            s = get(S, k, "running") + past * gradient
            z = weight * s + other * get(later, B_r + k, "later")
            q += z * get(v, k, "values")
            put(dv, k, z, "dvalues")
            put(S, k, decay * s, "running")
        dots[r, h] = dot
        total = R[h] + past * dot
        dlogits[t, h] = q - (weight * total + other * later_dots[r, h])
        R[h] = decay * total


@njit(**DOTS)
def backward_block(task, values, first, S, R, later, later_dots, dots):
    """Compute the gradients of the block at `first`."""
    num_heads, width, T, has_rounding = task.num_heads, task.width, task.num_time, task.rounding != 0
    p_values, p_means, p_rounding = task.values, task.means, task.rounding
    values_row, means_row, rounding_row = task.values_row, task.means_row, task.rounding_row
    p_dmeans, dmeans_row, p_dvalues, dvalues_row = task.dmeans, task.dmeans_row, task.dvalues, task.dvalues_row
    w, a, u, g = weights(task, W, 0, T), weights(task, A, 0, T), weights(task, U, 0, T), weights(task, G, 0, T)
    dlogits = floats(task.dlogits, T, num_heads)
    for t in range(min(first + task.window, T) - 1, first - 1, -1):
        v = row(values, p_values + values_row * t, num_heads, width)
        y = row(values, p_means + means_row * t, num_heads, width)
        rounding = row(values, p_rounding + rounding_row * t, num_heads, width)
        dy = row(values, p_dmeans + dmeans_row * t, num_heads, width)
        dv = row(values, p_dvalues + dvalues_row * t, num_heads, width)
        back_row(S, later, R, later_dots, v, y, rounding, dy, dv, w, a, u, g, has_rounding, dots, dlogits, t, t - first)


def backward(tasks, values, index, sources):
    """Compute the gradients of the part that `index` selects."""
    task = task_of(tasks, index, False)
    num_heads, width, k, T = task.num_heads, task.width, task.window, task.num_time
    first, last = part_bounds(task)
    # The first token of a block has a = 0, so S and R are 0 again when the block before it begins.
    S, R = np.zeros((num_heads, width), np.float32), np.zeros(num_heads, np.float32)
    later, later_dots = np.zeros((k, num_heads, width), np.float32), np.zeros((k, num_heads), np.float32)
    dots, turn = np.zeros((2, k, num_heads), np.float32), 0
    if last < T and first < last:
        compute_dots(task, values, last, min(k, T - last), dots[1])
    for t in range((last - 1) // k * k, first - 1, -k):
        if t + k < T:
            gather_later(task, values, t, later, later_dots, dots[1 - turn])
        backward_block(task, values, t, S, R, later, later_dots, dots[turn])
        turn = 1 - turn
