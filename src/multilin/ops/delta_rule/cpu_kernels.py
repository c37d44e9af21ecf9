"""Kernels of the delta rule's weights of pairs: every number is read and written once, while it is in the cache."""

import numpy as np
from numba import njit

from multilin.ops.kernels.cpu_intrinsics import DOTS, ONE, SCALARS, ZERO, arguments_of, exp_negative, part_of

LOG_2 = np.float32(0.6931471805599453)
LANES = 16


@njit(**SCALARS)
def decays(high, low, t, pairs):
    """2^(G_t - G_s), G = high + low, for s <= t, else 0."""
    high_t, low_t = high[t], low[t]
    end = min((t // LANES + 1) * LANES, pairs.size)
    for s in range(end):
        log = (high_t - high[s]) + (low_t - low[s])
        pairs[s] = exp_negative(LOG_2 * min(log, ZERO)) if s <= t else ZERO
    for s in range(end, pairs.size):
        pairs[s] = ZERO


@njit(**SCALARS)
def product(x, y, factor, result):
    """factor x y."""
    for s in range(result.size):
        result[s] = factor * x[s] * y[s]


@njit(**DOTS)
def add_product(x, y, factor, sums):
    """Add factor x y to the sums; returns the sum of x y."""
    total = ZERO
    for s in range(sums.size):
        xy = x[s] * y[s]
        sums[s] += factor * xy
        total += xy
    return total


@njit(**DOTS)
def scaled(x, y, factor, result):
    """result = factor x; returns the sum of x y."""
    total = ZERO
    for i in range(x.size):
        result[i] = factor * x[i]
        total += x[i] * y[i]
    return total


@njit(**DOTS)
def add_scaled(x, y, factor, sums):
    """Add factor x to the sums; returns the sum of x y."""
    total = ZERO
    for i in range(x.size):
        sums[i] += factor * x[i]
        total += x[i] * y[i]
    return total


@njit(**DOTS)
def sum_of(x):
    """The sum."""
    total = ZERO
    for s in range(x.size):
        total += x[s]
    return total


@njit(**SCALARS)
def mirror(x, t):
    """Make a row's numbers those of the column, too."""
    for s in range(t):
        x[s, t] = x[t, s]


def weigh(task, elements, index, sources):
    """One part of the chunks: decays of pairs, both products times them, and the system's matrix."""
    num_parts, high, low, rates, raw_scores, raw_overlaps, pairs, scores, overlaps, system = arguments_of(task)
    size = high.shape[1]
    first, last = part_of(len(high), num_parts, index)
    for i in range(first, last):
        for t in range(size):
            row = i * size + t
            decays(high[i], low[i], t, pairs[row])
            product(raw_scores[row], pairs[row], ONE, scores[row])
            if len(rates) > 0:
                product(raw_overlaps[row], pairs[row], ONE, overlaps[row])
                overlaps[row, t] = ZERO
                product(raw_overlaps[row], pairs[row], rates[i, t], system[row])


def unweigh(task, elements, index, sources):
    """One part of the chunks: gradients of both products, rates and logs; a log has that of all pairs around it.

    Rows from the last: when row t is done, sums hold for each s < t what the pairs (t.., s) have; their sum is log t's.
    """
    num_parts, raw_scores, raw_system, pairs, scores, overlaps, rates, dscores, dsystem, drates, dlogs = arguments_of(
        task
    )
    size = dlogs.shape[1]
    first, last = part_of(len(dlogs), num_parts, index)
    for i in range(first, last):
        dlogs[i] = ZERO
        for t in range(size - 1, -1, -1):
            row = i * size + t
            product(raw_scores[row], pairs[row], ONE, dscores[row])
            add_product(raw_scores[row], scores[row], ONE, dlogs[i])
            if len(rates) > 0:
                product(raw_system[row], pairs[row], rates[i, t], dsystem[row])
                drates[i, t] = add_product(raw_system[row], overlaps[row], rates[i, t], dlogs[i])
            dlogs[i, t] = sum_of(dlogs[i, :t])
        if len(rates) > 0:
            for t in range(size):
                dsystem[i * size + t, t] = ZERO
                mirror(dsystem[i * size : (i + 1) * size], t)


def rescale(task, elements, index, sources):
    """One part of the tokens: their gradients, and the four products that those of logs and rates are made of."""
    num_parts, dq, dk, dread, dknown, q, k, v, from_start, to_end, rates, dqueries, dkeys, dvalues, dots = arguments_of(
        task
    )
    first, last = part_of(len(q), num_parts, index)
    for row in range(first, last):
        dots[0, row] = scaled(dq[row], q[row], from_start[row], dqueries[row])
        dots[1, row] = scaled(dk[row], k[row], to_end[row], dkeys[row])
        if rates.size > 0:
            dots[2, row] = add_scaled(dread[row], k[row], -from_start[row] * rates[row], dkeys[row])
            dots[3, row] = scaled(dknown[row], v[row], rates[row], dvalues[row])
