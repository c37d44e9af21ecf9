"""CPU kernels of the prefix softmax over the whole past: forward.

With weights w, a (see `prefix_weights`), the running mean is m_t = a_t m_(t-1) + w_t v_t and

    y_t = g_t m_t + o_t v_t            g, o: shares of the past and of the own term; 1 and 0 without own term and null

Fewer texts than threads: time is cut in parts, one for each thread, and those in pieces, whose summaries (phase 1)
tell every part how its past ends (phase 2).
"""

from typing import Any

import numpy as np
from numba import carray, njit

from multilin.ops.prefix_softmax.cpu_math import (
    LOWEST,
    MEANS,
    NOTHING,
    ONE,
    RUNNING,
    SCALARS,
    VALUES,
    ZERO,
    assign,
    copy_row,
    exp_negative,
    fill_row,
    floats,
    four_shares,
    get,
    prefix_weights,
    put,
    row,
    starts_at,
)
from multilin.ops.prefix_softmax.cpu_task import ROWS


@njit
def piece_bounds(num_time: int, num_pieces: int, piece: int) -> Any:
    """First position of a piece of time, and the one after its last; multiples of ROWS, but for the end."""
    chunks = (num_time + ROWS - 1) // ROWS
    return chunks * piece // num_pieces * ROWS, min(num_time, chunks * (piece + 1) // num_pieces * ROWS)


@njit
def plane(task: Any, b: int, kind: int, first: int, num_rows: int) -> Any:
    """Rows of one kind of weight, (rows, H): 0 w, 1 a, 2 g, 3 o, 4 share of the null token."""
    planes = 5 if task.is_gated else 2
    offset = ((b * planes + kind) * task.num_time + first) * task.num_heads
    return floats(task.weights + 4 * offset, num_rows, task.num_heads)


@njit
def checkpoint(task: Any, b: int, chunk: int) -> Any:
    """The mean before position chunk * ROWS, (H, D), or the one after the last position."""
    chunks = (task.num_time + ROWS - 1) // ROWS
    size = 4 * task.num_heads * task.width
    return floats(task.checkpoints + size * (b * (chunks + 1) + chunk), task.num_heads, task.width)


@njit(**SCALARS)
def weigh(task: Any, b: int, first: int, top: Any, total: Any, tops: Any, totals: Any, w: Any, a: Any) -> None:
    """`prefix_weights` of rows of text b."""
    p_starts = task.starts + task.starts_batch * b if task.starts != 0 else 0
    p_logits = task.logits + task.logits_batch * b
    prefix_weights(p_logits, task.logits_row, p_starts, 0, first, top, total, w, a, tops, totals)


@njit(**SCALARS)
def gate(task: Any, b: int, first: int, tops: Any, totals: Any, others: Any, g: Any, o: Any, null: Any) -> None:
    """Shares g of the past, o of the own term and that of the null token; `others` is scratch (4, rows, H)."""
    own, no_tops, no_totals, unused = others[0], others[1], others[2], others[3]
    num_rows, num_heads = g.shape
    for i in range(num_rows):
        fill_row(no_tops, i, NOTHING)
        fill_row(no_totals, i, ZERO)
        if task.own != 0:
            copy_row(own, i, floats(task.own + task.own_batch * b + task.own_row * (first + i), 1, num_heads), 0)
        else:
            fill_row(own, i, NOTHING)
    four_shares(tops, totals, no_tops, no_totals, own, np.float32(task.null), g, unused, o, null)


@njit(**SCALARS)
def read_state(task: Any, b: int, top: Any, total: Any, mean: Any) -> None:
    """The summary token before the first position."""
    top[:] = LOWEST
    total[:] = 0.0
    mean[:] = ZERO
    if task.state_logits != 0:
        logits = floats(task.state_logits, task.num_batch, task.num_heads)[b]
        size = 4 * task.num_heads * task.width
        values = floats(task.state_values + size * b, task.num_heads, task.width)
        for h in range(task.num_heads):
            if logits[h] > LOWEST:
                top[h] = logits[h]
                total[h] = 1.0
                for d in range(task.width):
                    mean[h, d] = values[h, d]


@njit(**SCALARS)
def write_state(task: Any, b: int, top: Any, total: Any, mean: Any) -> None:
    """The summary token after the last position."""
    logits = floats(task.final_logits, task.num_batch, task.num_heads)[b]
    size = 4 * task.num_heads * task.width
    assign(floats(task.final_values + size * b, task.num_heads, task.width), mean)
    for h in range(task.num_heads):
        logits[h] = top[h] + np.log(total[h]) if total[h] > 0 else -np.inf


@njit(forceinline=True, **SCALARS)
def add_row(mean: Any, v: Any, w: Any, a: Any, i: int) -> None:
    """One more token in the running means."""
    H, D = mean.shape
    for h in range(H):
        weight, decay = w[i, h], a[i, h]
        for k in range(h * D, h * D + D):
            put(mean, k, decay * get(mean, k, RUNNING) + weight * get(v, k, VALUES), RUNNING)


@njit(forceinline=True, **SCALARS)
def mean_row(mean: Any, v: Any, y: Any, w: Any, a: Any, i: int) -> None:
    """As `add_row`, and the means are the result."""
    H, D = mean.shape
    for h in range(H):
        weight, decay = w[i, h], a[i, h]
        for k in range(h * D, h * D + D):
            m = decay * get(mean, k, RUNNING) + weight * get(v, k, VALUES)
            put(mean, k, m, RUNNING)
            put(y, k, m, MEANS)


@njit(forceinline=True, **SCALARS)
def gated_row(mean: Any, v: Any, y: Any, w: Any, a: Any, g: Any, o: Any, i: int) -> None:
    """As `mean_row`, gated."""
    H, D = mean.shape
    for h in range(H):
        weight, decay, past, own = w[i, h], a[i, h], g[i, h], o[i, h]
        for k in range(h * D, h * D + D):
            x = get(v, k, VALUES)
            m = decay * get(mean, k, RUNNING) + weight * x
            put(mean, k, m, RUNNING)
            put(y, k, past * m + own * x, MEANS)


@njit(**SCALARS)
def forward_rows(task: Any, values: Any, b: int, first: int, last: int, top: Any, total: Any, mean: Any) -> None:
    """Means of positions first <= t < last, from the state top, total, mean, which is moved on."""
    num_heads, width = task.num_heads, task.width
    scratch = np.empty((11, ROWS, num_heads), np.float32)
    p_values, p_means = task.values + task.values_batch * b, task.means + task.means_batch * b
    values_row, means_row = task.values_row, task.means_row
    is_gated = task.is_gated != 0
    for s in range(first, last, ROWS):
        n = min(ROWS, last - s)
        w, a, g, o, null = scratch[0, :n], scratch[1, :n], scratch[2, :n], scratch[3, :n], scratch[4, :n]
        if task.keeps:
            w, a = plane(task, b, 0, s, n), plane(task, b, 1, s, n)
            if is_gated:
                g, o, null = plane(task, b, 2, s, n), plane(task, b, 3, s, n), plane(task, b, 4, s, n)
            assign(checkpoint(task, b, s // ROWS), mean)
        tops, totals = scratch[5, :n], scratch[6, :n]
        weigh(task, b, s, top, total, tops, totals, w, a)
        if is_gated:
            gate(task, b, s, tops, totals, scratch[7:], g, o, null)
            for i in range(n):
                v = row(values, p_values + values_row * (s + i), num_heads, width)
                y = row(values, p_means + means_row * (s + i), num_heads, width)
                gated_row(mean, v, y, w, a, g, o, i)
        else:
            for i in range(n):
                v = row(values, p_values + values_row * (s + i), num_heads, width)
                y = row(values, p_means + means_row * (s + i), num_heads, width)
                mean_row(mean, v, y, w, a, i)


@njit
def summary(task: Any, b: int, piece: int) -> Any:
    """What a piece does to the state: three numbers per head, and a vector per head."""
    size = 3 * task.num_heads + task.num_heads * task.width
    address = task.summaries + 4 * size * (b * task.num_parts * task.num_parts + piece)
    vector = floats(address + 12 * task.num_heads, task.num_heads, task.width)
    return floats(address, 3, task.num_heads), vector


def summarize(tasks: Any, values: Any, index: int, sources: Any) -> None:
    """Phase 1, for text and piece `index`: top, total and mean of the piece, and whether it lets the past through."""
    task = carray(tasks, (1,))[0]
    num_heads, width, num_pieces = task.num_heads, task.width, task.num_parts * task.num_parts
    summarized = num_pieces - task.num_parts
    b, piece = index // summarized, index % summarized
    numbers, mean = summary(task, b, piece)
    top, total = np.full(num_heads, LOWEST, np.float32), np.zeros(num_heads, np.float64)
    mean[:] = ZERO
    numbers[2] = ONE
    scratch = np.empty((4, ROWS, num_heads), np.float32)
    first, last = piece_bounds(task.num_time, num_pieces, piece)
    for s in range(first, last, ROWS):
        n = min(ROWS, last - s)
        w, a = scratch[0, :n], scratch[1, :n]
        weigh(task, b, s, top, total, scratch[2, :n], scratch[3, :n], w, a)
        for i in range(n):
            v = row(values, task.values + task.values_batch * b + task.values_row * (s + i), num_heads, width)
            add_row(mean, v, w, a, i)
            if task.starts != 0 and starts_at(task.starts + task.starts_batch * b, s + i):
                numbers[2] = ZERO
    for h in range(num_heads):
        numbers[0, h] = top[h]
        numbers[1, h] = total[h]


@njit(**SCALARS)
def absorb(task: Any, b: int, piece: int, top: Any, total: Any, mean: Any) -> None:
    """Move a state on by a piece of time."""
    numbers, piece_mean = summary(task, b, piece)
    for h in range(task.num_heads):
        highest = max(top[h] if numbers[2, h] != 0 else LOWEST, numbers[0, h])
        past = total[h] * exp_negative(top[h] - highest) if numbers[2, h] != 0 else 0.0
        new = numbers[1, h] * exp_negative(numbers[0, h] - highest)
        top[h], total[h] = highest, past + new
        scale = 1.0 / max(total[h], 1e-300)
        a, w = np.float32(past * scale), np.float32(new * scale)
        for d in range(task.width):
            mean[h, d] = a * mean[h, d] + w * piece_mean[h, d]


def forward(tasks: Any, values: Any, index: int, sources: Any) -> None:
    """Means and state of text and part `index` (phase 2, if there are parts)."""
    task = carray(tasks, (1,))[0]
    num_parts = task.num_parts
    b, part = index // num_parts, index % num_parts
    top, total = np.empty(task.num_heads, np.float32), np.empty(task.num_heads, np.float64)
    mean = np.empty((task.num_heads, task.width), np.float32)
    read_state(task, b, top, total, mean)
    for piece in range(part * num_parts):
        absorb(task, b, piece, top, total, mean)
    first, _ = piece_bounds(task.num_time, num_parts * num_parts, part * num_parts)
    _, last = piece_bounds(task.num_time, num_parts * num_parts, (part + 1) * num_parts - 1)
    forward_rows(task, values, b, first, last, top, total, mean)
    if task.keeps and part == num_parts - 1:
        assign(checkpoint(task, b, (task.num_time + ROWS - 1) // ROWS), mean)
    if task.final_logits != 0 and part == num_parts - 1:
        write_state(task, b, top, total, mean)
