"""CPU kernels of the delta rule's element-wise steps (see `elementwise`); they read and write every number once."""

import numpy as np
from numba import njit

from multilin.ops.kernels.cpu_intrinsics import DOTS, ONE, SCALARS, ZERO, arguments_of, exp_negative, part_of, sum_of

LOG_2 = np.float32(0.6931471805599453)
LANES = 16


@njit(**SCALARS)
def decays(high, low, t, pairs):
    """Store 2^(G_t - G_s) in pairs[s] for s <= t, else 0; G = high + low."""
    high_t, low_t = high[t], low[t]
    end = min((t // LANES + 1) * LANES, pairs.size)
    for s in range(end):
        log = (high_t - high[s]) + (low_t - low[s])
        pairs[s] = exp_negative(LOG_2 * min(log, ZERO)) if s <= t else ZERO
    for s in range(end, pairs.size):
        pairs[s] = ZERO


@njit(**SCALARS)
def multiply(x, factor, y):
    """x = factor x y."""
    for i in range(x.size):
        x[i] = factor * x[i] * y[i]


@njit(**SCALARS)
def product(x, factor, result):
    """result = factor x."""
    for i in range(x.size):
        result[i] = factor * x[i]


@njit(**DOTS)
def add_product(x, y, factor, sums):
    """Add factor x y to the sums; returns the sum of x y."""
    total = ZERO
    for i in range(sums.size):
        xy = x[i] * y[i]
        sums[i] += factor * xy
        total += xy
    return total


@njit(**DOTS)
def scale(x, factor, y):
    """x = factor x; returns the sum of x y from before the change."""
    total = ZERO
    for i in range(x.size):
        total += x[i] * y[i]
        x[i] = factor * x[i]
    return total


@njit(**DOTS)
def add_scaled(x, y, factor, sums):
    """Add factor x to the sums; returns the sum of x y."""
    total = ZERO
    for i in range(x.size):
        sums[i] += factor * x[i]
        total += x[i] * y[i]
    return total


@njit(**SCALARS)
def mirror(x, t):
    """Copy row t of a matrix, up to its diagonal, to column t."""
    for s in range(t):
        x[s, t] = x[t, s]


def weigh(task, elements, index, sources):
    """For one part of the chunks: multiply both products by the decays, in place, and compute the system's matrix."""
    num_parts, high, low, rates, row_decays, scores, overlaps, system = arguments_of(task)
    size = high.shape[1]
    first, last = part_of(len(high), num_parts, index)
    for i in range(first, last):
        for t in range(size):
            row = i * size + t
            decays(high[i], low[i], t, row_decays[i])
            multiply(scores[row], ONE, row_decays[i])
            if len(rates) > 0:
                row_decays[i, t] = ZERO
                multiply(overlaps[row], ONE, row_decays[i])
                product(overlaps[row], rates[i, t], system[row])


def unweigh(task, elements, index, sources):
    """For one part of the chunks: compute the gradients of both products, in place, and of rates and logs.

    A log gets the gradients of all pairs whose decay contains this log. Rows go from last to first: after row t,
    dlogs[s] is the sum over the pairs of s with t and later tokens, and the sum over s < t is the gradient of log t.
    """
    num_parts, high, low, rates, row_decays, dscores, dsystem, scores, overlaps, drates, dlogs = arguments_of(task)
    size = dlogs.shape[1]
    first, last = part_of(len(dlogs), num_parts, index)
    for i in range(first, last):
        dlogs[i] = ZERO
        for t in range(size - 1, -1, -1):
            row = i * size + t
            decays(high[i], low[i], t, row_decays[i])
            add_product(dscores[row], scores[row], ONE, dlogs[i])
            multiply(dscores[row], ONE, row_decays[i])
            if len(rates) > 0:
                drates[i, t] = add_product(dsystem[row], overlaps[row], rates[i, t], dlogs[i])
                row_decays[i, t] = ZERO
                multiply(dsystem[row], rates[i, t], row_decays[i])
            dlogs[i, t] = sum_of(dlogs[i, :t])
        if len(rates) > 0:
            for t in range(size):
                mirror(dsystem[i * size : (i + 1) * size], t)


def rescale(task, elements, index, sources):
    """For one part of the tokens: compute gradients in place, and four products for the gradients of logs and rates."""
    num_parts, from_start, to_end, rates, dq, dk, dknown, dread, q, k, v, dots = arguments_of(task)
    first, last = part_of(len(q), num_parts, index)
    for row in range(first, last):
        dots[0, row] = scale(dq[row], from_start[row], q[row])
        dots[1, row] = scale(dk[row], to_end[row], k[row])
        if rates.size > 0:
            dots[2, row] = add_scaled(dread[row], k[row], -from_start[row] * rates[row], dk[row])
            dots[3, row] = scale(dknown[row], rates[row], v[row])
