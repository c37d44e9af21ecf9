"""The kernel of `linear_cross_entropy`: a row of logits is read once and written once, and worked on in the cache.

With x = scale l + bias and p = softmax(x), the loss is log sum e^x - (1 - s) x_target - s mean(x), and its gradient
p - s / V - (1 - s) onehot(target), times the scale for the logits.
"""

import numpy as np
from numba import carray, njit

from multilin.ops.kernels.cpu_intrinsics import (
    DOTS,
    ONE,
    SCALARS,
    ZERO,
    array,
    exp_negative,
    floats,
    narrow,
    part_of_rows,
    widen,
)

NAN = np.float32(np.nan)
POSITIVE, INFINITE = np.int32(0x7FFFFFFF), np.int32(0x7F800000)


@njit(**SCALARS)
def read(logits, scale, bias, scores):
    """scores = scale logits + bias, without bias if it is empty."""
    for j in range(scores.size):
        scores[j] = scale * widen(logits[j])
    for j in range(bias.size):
        scores[j] += bias[j]


@njit
def largest(scores):
    """The largest number, or nan if there is one: compared as integers, which the compiler can vectorise."""
    top, has_nan = np.int32(-POSITIVE), np.int32(0)
    for j in range(scores.size):
        bits = np.float32(scores[j]).view(np.int32)
        size = np.int32(bits & POSITIVE)
        key = bits if bits >= 0 else np.int32(-size)
        top = key if key > top else top
        has_nan = np.int32(has_nan | np.int32(size > INFINITE))
    if has_nan != 0:
        return NAN
    return np.int32(top).view(np.float32) if top >= 0 else -np.int32(-top).view(np.float32)


@njit(**DOTS)
def total(scores):
    """Sum of the numbers."""
    result = ZERO
    for j in range(scores.size):
        result += scores[j]
    return result


@njit(**SCALARS)
def exponentials(scores, top):
    """e^(x - top), in place."""
    for j in range(scores.size):
        scores[j] = exp_negative(scores[j] - top)


@njit(**SCALARS)
def write(scores, factor, shift, scale, dlogits):
    """dlogits = scale (factor scores - shift)."""
    for j in range(scores.size):
        dlogits[j] = narrow(scale * (factor * scores[j] - shift), dlogits[j])


@njit(**SCALARS)
def add(scores, factor, shift, result):
    """result += factor scores - shift."""
    for j in range(scores.size):
        result[j] += factor * scores[j] - shift


def forward(tasks, elements, index, sources):
    """One part of the rows of logits (num_rows, width), whose gradient replaces them if makes_gradient.

    scale is the factor on the logits, smoothing the share of the target that is spread over all tokens; scores and
    dbias are (num_parts, width) float32 to work in; bias and dbias may be 0.
    """
    task = carray(tasks, (1,))[0]
    width, scale, smoothing = task.width, np.float32(task.scale), np.float32(task.smoothing)
    kept = ONE - smoothing
    shift = smoothing / np.float32(width)
    first, last = part_of_rows(task.num_rows, task.num_parts, index)
    all_logits = array(elements, task.logits, (task.num_rows, width))
    targets = array(np.int64, task.targets, (task.num_rows,))
    losses = floats(task.losses, 1, task.num_rows)[0]
    scores = floats(task.scores, task.num_parts, width)[index]
    bias = floats(task.bias, 1, width if task.bias != 0 else 0)[0]
    dbias = floats(task.dbias, task.num_parts, width if task.dbias != 0 else 0)[index]
    for i in range(first, last):
        logits, target = all_logits[i], targets[i]
        if target == task.ignored:
            losses[i] = ZERO
            if task.makes_gradient != 0:
                for j in range(width):
                    logits[j] = narrow(ZERO, logits[j])
            continue
        read(logits, scale, bias, scores)
        top, wanted = largest(scores), scores[target]
        mean = total(scores) / np.float32(width) if smoothing != ZERO else ZERO
        exponentials(scores, top)
        weight = total(scores)
        losses[i] = np.float32(np.log(np.float64(weight))) + top - kept * wanted - smoothing * mean
        if task.makes_gradient != 0:
            factor = ONE / weight if top == top else NAN
            share = factor * scores[target] - shift - kept
            write(scores, factor, shift, scale, logits)
            logits[target] = narrow(scale * share, logits[target])
            if dbias.size != 0:
                add(scores, factor, shift, dbias)
                dbias[target] -= kept
