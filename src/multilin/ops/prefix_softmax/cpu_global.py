"""CPU kernels of the prefix softmax over the whole past.

Forward: with weights w, a (see `prefix_weights`), the running mean is m_t = a_t m_(t-1) + w_t v_t and

    y_t = g_t m_t + o_t x_t            x_t: v_t for an own term, 0 for a null token; g, o: the weights of m_t and x_t

Without own term and null token, y is m. Backward, descending in time:

    S_t = g_t dy_t + a_(t+1) S_(t+1)            dv_t = w_t S_t + o_t dy_t (own term)
    z_t = S_t . (v_t - m_(t-1))                 p_t = g_t o_t dy_t . (x_t - m_t)
    C_t = -p_t + a_(t+1) (C_(t+1) - w_(t+1) z_(t+1))
    dl_t = w_t (a_t z_t + C_t)                  down_t = p_t

S_t has a term for each position s >= t. C_t is the sum of the same terms, each multiplied by m_t - y_s. So tokens are
compared with means component by component: if one token has nearly all the weight, the differences are 0, not the
rounding error of two large sums. If y is m in float32, the backward pass reads y. Else one mean in ROWS is stored, and
the backward pass computes the others again. S and C before the first position are the gradient of the state.

Rounding errors do not add up over a long text: m and S are summed as in `cpu_sums`, and C is in float64.

With fewer texts than threads, time is cut into one part per thread, and each part into pieces. A first launch
summarises each piece. A second launch merges the summaries before each part (backward: after it) and computes the part.
"""

import numpy as np
from numba import njit

from multilin.ops.kernels.cpu_intrinsics import (
    DOTS,
    LOWEST,
    NOTHING,
    ONE,
    SCALARS,
    TINY,
    ZERO,
    doubles,
    exp_negative,
    floats,
)
from multilin.ops.prefix_softmax.cpu import ROWS
from multilin.ops.prefix_softmax.cpu_math import (
    get,
    merge_weights,
    prefix_weights,
    put,
    row,
    starts_at,
    task_of,
    weights,
)
from multilin.ops.prefix_softmax.cpu_sums import (
    assign,
    checkpoint,
    exact_decay,
    move_on,
    piece_bounds,
    summary,
    zeros_beside,
)

W, A, G, O = range(4)  # noqa: E741 - kinds of weights; G and O exist only where y is not simply m


@njit(**SCALARS)
def gate(task, first, tops, totals, others, g, o):
    """Compute the weights g of the mean and o of the own term or the null token; `others` is scratch (2, rows, H)."""
    num_rows, num_heads = g.shape
    other_tops, other_totals = others[0, :num_rows], others[1, :num_rows]
    for i in range(num_rows):
        for h in range(num_heads):
            other_tops[i, h] = task.null
            other_totals[i, h] = ONE
        if task.own != 0:
            assign(other_tops[i : i + 1], floats(task.own + task.own_row * (first + i), 1, num_heads))
    merge_weights(tops, totals, other_tops, other_totals, NOTHING, g, o)


@njit(forceinline=True, **SCALARS)
def mean_row(past, lost, left, new, v, y, w, a, g, o, is_gated, has_own, is_summary, i):
    """Add one token to `new`, `lost` and `left` (see `move_on`), and compute y, which a summary does not need."""
    H, D = new.shape
    for h in range(H):
        weight, decay, gate, own = w[i, h], a[i, h], g[i, h], o[i, h] if has_own else ZERO
        lost[h] += weight * left[h]
        left[h] *= decay
        rest = left[h]
        for k in range(h * D, h * D + D):
            x = get(v, k, "values")
            n = decay * get(new, k, "running") + weight * x
            put(new, k, n, "running")
            if not is_summary:
                m = rest * get(past, k, "past") + n
                put(y, k, gate * m + own * x if is_gated else m, "means")


@njit(forceinline=True, **SCALARS)
def forward_rows(task, values, first, last, top, total, mean, is_summary):
    """Compute the means of positions first <= t < last; update top, total and mean, the state before them."""
    num_heads, width, is_gated, has_own = task.num_heads, task.width, task.is_gated != 0, task.own != 0
    p_values, values_row, p_means, means_row = task.values, task.values_row, task.means, task.means_row
    keeps = task.weights != 0 and not is_summary
    scratch = np.empty((10, ROWS, num_heads), np.float32)
    lost, left = np.zeros(num_heads, np.float32), np.ones(num_heads, np.float32)
    past, new = zeros_beside(p_values, num_heads, width)
    assign(past, mean)
    for s in range(first, last, ROWS):
        n = min(ROWS, last - s)
        w, a, g, o = scratch[0, :n], scratch[1, :n], scratch[2, :n], scratch[3, :n]
        if keeps:
            w, a = weights(task, W, s, n), weights(task, A, s, n)
            assign(checkpoint(task, s // ROWS), past)
        tops, totals = scratch[4, :n], scratch[5, :n]
        prefix_weights(task, 0, s, top, total, scratch[6:], tops, totals, w, a)
        if is_gated and not is_summary:
            if keeps:
                g, o = weights(task, G, s, n), weights(task, O, s, n)
            gate(task, s, tops, totals, scratch[8:], g, o)
        for i in range(n):
            v = row(values, p_values + values_row * (s + i), num_heads, width)
            y = row(values, p_means + means_row * (s + i), num_heads, width)
            if is_gated:
                mean_row(past, lost, left, new, v, y, w, a, g, o, True, has_own, is_summary, i)
            else:
                mean_row(past, lost, left, new, v, y, w, a, w, a, False, False, is_summary, i)
        move_on(mean, lost, left, new, past)


def forward_summaries(tasks, values, index, sources):
    """First launch: store top, total and mean of piece number `index`, and whether no text starts in this piece."""
    task = task_of(tasks, index, True)
    piece = task.part
    numbers, rounded_mean = summary(task, piece)
    top, total = np.full(task.num_heads, LOWEST, np.float32), np.zeros(task.num_heads, np.float64)
    mean = np.zeros((task.num_heads, task.width), np.float64)
    first, last = piece_bounds(task, piece)
    forward_rows(task, values, first, last, top, total, mean, True)
    assign(rounded_mean, mean)
    numbers[2] = ONE
    for t in range(first, last):
        if starts_at(task, t):
            numbers[2] = ZERO
    for h in range(task.num_heads):
        numbers[0, h], numbers[1, h] = top[h], total[h]


@njit(**SCALARS)
def merge_token(top, total, mean, h, passes, new_top, new_total, new_mean):
    """Merge the state of head h with one token that summarises all later tokens; if not `passes`, replace the state."""
    highest = max(top[h] if passes else LOWEST, new_top)
    past = total[h] * exp_negative(top[h] - highest) if passes else 0.0
    new = new_total * exp_negative(new_top - highest)
    top[h], total[h] = highest, past + new
    scale = 1.0 / max(total[h], TINY)
    for d in range(mean.shape[1]):
        mean[h, d] = past * scale * mean[h, d] + new * scale * new_mean[d]


def forward(tasks, values, index, sources):
    """Compute the means of the part that `index` selects, and the final state."""
    task = task_of(tasks, index, False)
    num_heads, part, num_parts = task.num_heads, task.part, task.num_parts
    top, total = np.full(num_heads, LOWEST, np.float32), np.zeros(num_heads, np.float64)
    mean = np.zeros((num_heads, task.width), np.float64)
    if task.state_logits != 0:
        logits = doubles(task.state_logits, num_heads)
        assign(mean, floats(task.state_values, num_heads, task.width))
        for h in range(num_heads):
            if logits[h] <= LOWEST:
                mean[h] = ZERO
            else:
                top[h] = logits[h]
                total[h] = np.exp(logits[h] - top[h])
    for piece in range(part * num_parts):
        numbers, piece_mean = summary(task, piece)
        for h in range(num_heads):
            merge_token(top, total, mean, h, numbers[2, h] != 0, numbers[0, h], numbers[1, h], piece_mean[h])
    first, last = piece_bounds(task, part * num_parts)[0], piece_bounds(task, (part + 1) * num_parts - 1)[1]
    forward_rows(task, values, first, last, top, total, mean, False)
    if part < num_parts - 1:
        return
    if task.weights != 0:
        assign(checkpoint(task, (task.num_time + ROWS - 1) // ROWS), mean)
    if task.final_logits != 0:
        assign(floats(task.final_values, num_heads, task.width), mean)
        final_logits = doubles(task.final_logits, num_heads)
        for h in range(num_heads):
            final_logits[h] = NOTHING if total[h] == 0 else top[h] + np.log(total[h])


@njit(**SCALARS)
def compute_means(task, values, first, means, w, a):
    """Set means[0] to the checkpoint, m before row `first`, and means[i + 1] to m at row first + i."""
    H, D = task.num_heads, task.width
    assign(means[0], checkpoint(task, first // ROWS))
    for i in range(w.shape[0]):
        v = row(values, task.values + task.values_row * (first + i), H, D)
        for h in range(H):
            weight, decay, old = w[i, h], a[i, h], (i * H + h) * D
            for d in range(D):
                m = decay * get(means, old + d, "means") + weight * get(v, h * D + d, "values")
                put(means, old + H * D + d, m, "means")


@njit(forceinline=True, **DOTS)
def back_row(
    later, lost, left, new, C, means, old, v, dy, dv, w, a, g, o, is_gated, has_own, is_summary, dlogits, down, i
):
    """Go back by one position: update C, and `new`, the rows' share of S; store gradients, except for a summary.

    The mean before the position begins at element `old` of `means`; if gated, the mean after the position follows.
    Heads are processed in descending order, like positions: ascending order takes twice as long.
    """
    H, D = new.shape
    for h in range(H - 1, -1, -1):
        weight, decay, past, own, rest, z, p = w[i, h], a[i, h], g[i, h], o[i, h], left[h], ZERO, ZERO
        lost[h] += weight * rest
        left[h] = decay * rest
        for k in range(h * D, h * D + D):
            gradient, x = get(dy, k, "dmeans"), get(v, k, "values")
            n = get(new, k, "running") + (past * gradient if is_gated else gradient)
            put(new, k, decay * n, "running")
            s = rest * get(later, k, "past") + n
            z += s * (x - get(means, old + k, "means"))
            if is_gated:
                p += gradient * ((x if has_own else ZERO) - get(means, old + H * D + k, "means"))
            if not is_summary:
                put(dv, k, weight * s + own * gradient if has_own else weight * s, "dvalues")
        c = C[h] - past * own * p if is_gated else C[h]
        C[h] = exact_decay(weight, decay) * (c - weight * z)
        if not is_summary:
            dlogits[i, h] = weight * (decay * z + c)
        if has_own and not is_summary:
            down[i, h] = past * own * p


@njit(forceinline=True, **SCALARS)
def backward_rows(task, values, first, last, S, C, is_summary):
    """Compute gradients of positions first <= t < last; update S and C of the later positions, in float64."""
    num_heads, width, is_gated, has_own = task.num_heads, task.width, task.is_gated != 0, task.down != 0
    p_values, values_row, p_means, means_row = task.values, task.values_row, task.means, task.means_row
    p_dmeans, dmeans_row, p_dvalues, dvalues_row = task.dmeans, task.dmeans_row, task.dvalues, task.dvalues_row
    means = np.empty((ROWS + 1, num_heads, width), np.float32)
    lost, left = np.zeros(num_heads, np.float32), np.ones(num_heads, np.float32)
    later, new = zeros_beside(p_values, num_heads, width)
    assign(later, S)
    for s in range((last - 1) // ROWS * ROWS, first - 1, -ROWS):
        n = min(ROWS, last - s)
        w, a = weights(task, W, s, n), weights(task, A, s, n)
        g, o = (weights(task, G, s, n), weights(task, O, s, n)) if is_gated else (w, a)
        dlogits = floats(task.dlogits + 4 * num_heads * s, n, num_heads)
        down = floats(task.down + 4 * num_heads * s, n, num_heads) if has_own else dlogits
        if is_gated:
            compute_means(task, values, s, means, w, a)
        for i in range(n - 1, -1, -1):
            v = row(values, p_values + values_row * (s + i), num_heads, width)
            dy = row(values, p_dmeans + dmeans_row * (s + i), num_heads, width)
            dv = row(values, p_dvalues + dvalues_row * (s + i), num_heads, width)
            if is_gated:
                old = i * num_heads * width
                back_row(
                    later, lost, left, new, C, means, old, v, dy, dv, w, a, g, o, True, has_own, is_summary,
                    dlogits, down, i,
                )  # fmt: skip
            else:
                p_before = p_means + means_row * (s + i - 1) if s + i > 0 else task.checkpoints
                before = floats(p_before, num_heads, width)
                back_row(
                    later, lost, left, new, C, before, 0, v, dy, dv, w, a, w, a, False, False, is_summary,
                    dlogits, down, i,
                )  # fmt: skip
        move_on(S, lost, left, new, later)


def backward_summaries(tasks, values, index, sources):
    """First launch: store S, C and decay of the piece that `index` selects; pieces of the first part are skipped."""
    task = task_of(tasks, index, True)
    piece = task.part + task.num_parts
    (numbers, rounded_S), num_heads = summary(task, piece), task.num_heads
    S, C, decays = np.zeros((num_heads, task.width)), np.zeros((1, num_heads)), np.ones((1, num_heads))
    first, last = piece_bounds(task, piece)
    backward_rows(task, values, first, last, S, C[0], True)
    w, a = weights(task, W, first, last - first), weights(task, A, first, last - first)
    for i in range(last - first):
        for h in range(num_heads):
            decays[0, h] *= exact_decay(w[i, h], a[i, h])
    assign(rounded_S, S)
    assign(numbers[0:1], C)
    assign(numbers[1:2], decays)


def backward(tasks, values, index, sources):
    """Compute the gradients of the part that `index` selects."""
    task = task_of(tasks, index, False)
    num_heads, width, part, num_parts = task.num_heads, task.width, task.part, task.num_parts
    S, C = np.zeros((num_heads, width), np.float64), np.zeros((1, num_heads), np.float64)
    if task.dfinal_logits != 0:
        assign(S, floats(task.dfinal_values, num_heads, width))
        assign(C, floats(task.dfinal_logits, 1, num_heads))
    for piece in range(num_parts * num_parts - 1, (part + 1) * num_parts - 1, -1):
        # C refers to the mean after the piece; here it is changed to refer to the mean before the piece.
        numbers, piece_S = summary(task, piece)
        first, last = piece_bounds(task, piece)
        before, after = checkpoint(task, first // ROWS), checkpoint(task, (last + ROWS - 1) // ROWS)
        for h in range(num_heads):
            moved = 0.0
            for d in range(width):
                moved += S[h, d] * (before[h, d] - after[h, d])
                S[h, d] = piece_S[h, d] + numbers[1, h] * S[h, d]
            C[0, h] = numbers[0, h] + numbers[1, h] * (C[0, h] + moved)
    first, last = piece_bounds(task, part * num_parts)[0], piece_bounds(task, (part + 1) * num_parts - 1)[1]
    backward_rows(task, values, first, last, S, C[0], False)
    if task.dstate_logits != 0 and part == 0:
        assign(floats(task.dstate_values, num_heads, width), S)
        assign(floats(task.dstate_logits, 1, num_heads), C)
