"""CPU kernels of the prefix softmax over a window of k tokens: forward, in time that does not depend on k.

Time is cut in blocks of k (van Herk, Gil-Werman): the window of a position at offset r of block c is the prefix of c up
to r, and the suffix of block c - 1 from r + 1 on. Prefix means m restart in every block, with weights w, a (see
`prefix_weights`). Suffix means go backward through a block with weights u, b alike, V_r = b_r V_(r+1) + u_r v_r, and

    y_t = g_t m_t + h_t V_(r+1) + o_t v_t          g, h, o: shares of prefix, suffix and own term

A text start restarts the prefix; h is 0 after it; and tokens before the last start of a block have u = 0, b = 1.
"""

from typing import Any

import numpy as np
from numba import carray, njit

from multilin.ops.prefix_softmax.cpu_math import (
    LATER,
    LOWEST,
    MEANS,
    NOTHING,
    OTHER_TOPS,
    OTHER_TOTALS,
    ROUNDING,
    RUNNING,
    SCALARS,
    TOPS,
    TOTALS,
    VALUES,
    ZERO,
    copy_row,
    exponentials,
    fill_row,
    floats,
    four_shares,
    get,
    prefix_weights,
    put,
    raise_top,
    rounded_like,
    row,
    share_out,
    starts_at,
    two_shares,
)

GROUP = 64  # positions whose weights are computed together, or one block if it is longer
W, A, U, B, G, H, OWN = range(7)  # planes of weights; the last exists where there is an own term


@njit
def plane(task: Any, b: int, kind: int, first: int, num_rows: int) -> Any:
    """Rows of one kind of weight, (rows, H)."""
    planes = 7 if task.own != 0 else 6
    offset = ((b * planes + kind) * task.num_time + first) * task.num_heads
    return floats(task.weights + 4 * offset, num_rows, task.num_heads)


@njit
def p_starts(task: Any, b: int) -> int:
    """Address of the text starts of text b, 0 where there are none."""
    return task.starts + task.starts_batch * b if task.starts != 0 else 0


@njit(**SCALARS)
def suffix_weights(task: Any, b: int, first: int, u: Any, decay: Any, tops: Any, totals: Any) -> None:
    """u_r = e^(l_r - Q_r), b_r = e^(Q_(r+1) - Q_r) of whole blocks, Q_r the log of the total weight from r on."""
    num_rows, num_heads = u.shape
    starts, p_logits, k = p_starts(task, b), task.logits + task.logits_batch * b, task.window
    top, total = np.full(num_heads, LOWEST, np.float32), np.zeros(num_heads, np.float64)
    nothing = np.full((1, num_heads), NOTHING, np.float32)
    is_hidden, left = False, 0
    for i in range(num_rows - 1, -1, -1):
        is_last = left == 0
        if is_last:
            left, is_hidden = k, False
        left -= 1
        if is_hidden:
            raise_top(nothing, is_last, top, u, decay, tops, i)
        else:
            logits = floats(p_logits + task.logits_row * (first + i), 1, num_heads)
            raise_top(logits, is_last, top, u, decay, tops, i)
        is_hidden = is_hidden or starts_at(starts, first + i)
    exponentials(u.reshape(u.size))
    exponentials(decay.reshape(decay.size))
    for i in range(num_rows - 1, -1, -1):
        share_out(total, u, decay, totals, i)


@njit(**SCALARS)
def gate(
    task: Any, b: int, first: int, before: int, tops: Any, totals: Any, suffix_tops: Any, suffix_totals: Any,
    others: Any, g: Any, h: Any, o: Any,
) -> None:  # fmt: skip
    """Shares of prefix, suffix and own term in rows from `first`; rows of the suffixes count from `before`."""
    starts, k, is_cut, offset = p_starts(task, b), task.window, False, 0
    other_tops, other_totals, own, unused = others[0], others[1], others[2], others[3]
    num_rows, num_heads = g.shape
    for i in range(num_rows):
        t = first + i
        if offset == 0:
            is_cut = t < k
        offset = 0 if offset + 1 == k else offset + 1
        is_cut = is_cut or starts_at(starts, t)
        if is_cut or offset == 0:
            fill_row(other_tops, i, NOTHING)
            fill_row(other_totals, i, ZERO)
        else:
            j = t + 1 - k - before
            for head in range(num_heads):
                put(other_tops, i * num_heads + head, get(suffix_tops, j * num_heads + head, TOPS), OTHER_TOPS)
                total = get(suffix_totals, j * num_heads + head, TOTALS)
                put(other_totals, i * num_heads + head, total, OTHER_TOTALS)
        if task.own != 0:
            copy_row(own, i, floats(task.own + task.own_batch * b + task.own_row * t, 1, num_heads), 0)
    if task.own == 0 and task.null == -np.inf:
        two_shares(tops, totals, other_tops, other_totals, g, h)
        return
    if task.own == 0:
        for i in range(num_rows):
            fill_row(own, i, NOTHING)
    four_shares(tops, totals, other_tops, other_totals, own, np.float32(task.null), g, h, o, unused)


@njit(forceinline=True, **SCALARS)
def suffix_row(means: Any, v: Any, u: Any, b: Any, i: int, r: int) -> None:
    """V_r = b_r V_(r+1) + u_r v_r, with the weights of row i."""
    _, H, D = means.shape
    for h in range(H - 1, -1, -1):
        weight, decay, new = u[i, h], b[i, h], (r * H + h) * D
        for d in range(D):
            V = decay * get(means, new + H * D + d, LATER) + weight * get(v, h * D + d, VALUES)
            put(means, new + d, V, LATER)


@njit(forceinline=True, **SCALARS)
def window_row(mean: Any, suffix: Any, v: Any, y: Any, w: Any, a: Any, g: Any, s: Any, i: int, r: int) -> None:
    """The prefix mean moves on by a token; y is merged from it and from suffix r + 1."""
    H, D = mean.shape
    later = (r + 1) * H * D
    for h in range(H):
        weight, decay, prefix_share, suffix_share = w[i, h], a[i, h], g[i, h], s[i, h]
        for k in range(h * D, h * D + D):
            m = decay * get(mean, k, RUNNING) + weight * get(v, k, VALUES)
            put(mean, k, m, RUNNING)
            put(y, k, prefix_share * m + suffix_share * get(suffix, later + k, LATER), MEANS)


@njit(forceinline=True, **SCALARS)
def full_row(
    mean: Any, suffix: Any, v: Any, y: Any, rounding: Any, w: Any, a: Any, g: Any, s: Any, o: Any, has_own: bool,
    keeps: bool, i: int, r: int,
) -> None:  # fmt: skip
    """As `window_row`, with an own term, if there is one, and with what y loses by rounding, if it `keeps` that."""
    H, D = mean.shape
    later = (r + 1) * H * D
    for h in range(H):
        weight, decay, prefix_share, suffix_share = w[i, h], a[i, h], g[i, h], s[i, h]
        own = o[i, h] if has_own else ZERO
        for k in range(h * D, h * D + D):
            x = get(v, k, VALUES)
            m = decay * get(mean, k, RUNNING) + weight * x
            put(mean, k, m, RUNNING)
            exact = prefix_share * m + suffix_share * get(suffix, later + k, LATER) + own * x
            put(y, k, exact, MEANS)
            if keeps:
                put(rounding, k, exact - rounded_like(exact, y), ROUNDING)


@njit(**SCALARS)
def part_bounds(task: Any, part: int) -> Any:
    """First position of a part of time, and the one after its last; multiples of the window, but for the end."""
    blocks = (task.num_time + task.window - 1) // task.window
    first = blocks * part // task.num_parts * task.window
    return first, min(task.num_time, blocks * (part + 1) // task.num_parts * task.window)


@njit(**SCALARS)
def forward_blocks(
    task: Any, values: Any, b: int, first: int, before: int, mean: Any, suffix: Any,
    w: Any, a: Any, u: Any, decay: Any, g: Any, h: Any, o: Any,
) -> None:  # fmt: skip
    """Means of blocks from `first`, with these weights; rows of u and its decay count from `before`.

    suffix[r] is V_r of the block before, for r > 0; suffix[k] stays 0.
    """
    num_heads, width, k, num_rows = task.num_heads, task.width, task.window, w.shape[0]
    p_values, values_row = task.values + task.values_batch * b, task.values_row
    p_means, means_row = task.means + task.means_batch * b, task.means_row
    p_rounding = task.rounding + task.means_batch * b if task.rounding != 0 else p_means
    has_own, keeps = task.own != 0, task.rounding != 0
    for start in range(0, num_rows, k):
        if first + start > 0:
            for r in range(k - 1, 0, -1):
                t = first + start - k + r
                v = row(values, p_values + values_row * t, num_heads, width)
                suffix_row(suffix, v, u, decay, t - before, r)
        for i in range(start, min(start + k, num_rows)):
            v = row(values, p_values + values_row * (first + i), num_heads, width)
            y = row(values, p_means + means_row * (first + i), num_heads, width)
            if not has_own and not keeps:
                window_row(mean, suffix, v, y, w, a, g, h, i, i - start)
            else:
                rounding = row(values, p_rounding + means_row * (first + i), num_heads, width)
                full_row(mean, suffix, v, y, rounding, w, a, g, h, o, has_own, keeps, i, i - start)


def forward(tasks: Any, values: Any, index: int, sources: Any) -> None:
    """Means of text and part `index`."""
    task = carray(tasks, (1,))[0]
    num_heads, k, keeps = task.num_heads, task.window, task.keeps != 0
    b, part = index // task.num_parts, index % task.num_parts
    first, last = part_bounds(task, part)
    group = k * max(1, GROUP // k)
    scratch = np.empty((15, group, num_heads), np.float32)
    mean = np.zeros((num_heads, task.width), np.float32)
    suffix = np.zeros((k + 1, num_heads, task.width), np.float32)
    top, total = np.full(num_heads, LOWEST, np.float32), np.zeros(num_heads, np.float64)
    for s in range(first, last, group):
        n = min(group, last - s)
        before, last_block = max(s - k, 0), s + (n - 1) // k * k
        m = last_block - before
        w, a, g, h, o = scratch[W, :n], scratch[A, :n], scratch[G, :n], scratch[H, :n], scratch[OWN, :n]
        u, decay = scratch[U, :m], scratch[B, :m]
        if keeps:
            w, a = plane(task, b, W, s, n), plane(task, b, A, s, n)
            g, h = plane(task, b, G, s, n), plane(task, b, H, s, n)
            u, decay = plane(task, b, U, before, m), plane(task, b, B, before, m)
            if task.own != 0:
                o = plane(task, b, OWN, s, n)
            if s + n == task.num_time:
                # No block comes after the last one to read its suffixes.
                plane(task, b, U, last_block, s + n - last_block)[:] = ZERO
                plane(task, b, B, last_block, s + n - last_block)[:] = ZERO
        tops, totals, suffix_tops, suffix_totals = scratch[7, :n], scratch[8, :n], scratch[9, :m], scratch[10, :m]
        prefix_weights(
            task.logits + task.logits_batch * b, task.logits_row, p_starts(task, b), k, s, top, total, w, a,
            tops, totals,
        )  # fmt: skip
        suffix_weights(task, b, before, u, decay, suffix_tops, suffix_totals)
        gate(task, b, s, before, tops, totals, suffix_tops, suffix_totals, scratch[11:], g, h, o)
        forward_blocks(task, values, b, s, before, mean, suffix, w, a, u, decay, g, h, o)
