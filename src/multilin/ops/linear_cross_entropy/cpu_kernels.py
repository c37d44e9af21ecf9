"""The kernel of `linear_cross_entropy`, which reads and writes each row of logits once and works in the cache.

With x = l + bias and p = softmax(x), the loss is log sum e^x - (1 - s) x_target - s mean(x). Its gradient is
p - s / V - (1 - s) onehot(target).
"""

import numpy as np
from numba import njit

from multilin.ops.kernels.cpu_intrinsics import (
    ONE,
    SCALARS,
    ZERO,
    arguments_of,
    exp_negative,
    narrow,
    part_of,
    sum_of,
    widen,
)

NAN = np.float32(np.nan)
POSITIVE, INFINITE = np.int32(0x7FFFFFFF), np.int32(0x7F800000)


@njit(**SCALARS)
def read(logits, bias, scores):
    """scores = logits + bias, or scores = logits if the bias is empty."""
    for j in range(scores.size):
        scores[j] = widen(logits[j])
    for j in range(bias.size):
        scores[j] += bias[j]


@njit
def largest(scores):
    """The largest number, or nan if one is nan. Numbers are compared as integers, which the compiler can vectorise."""
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


@njit(**SCALARS)
def exponentials(scores, top):
    """e^(x - top), in place."""
    for j in range(scores.size):
        scores[j] = exp_negative(scores[j] - top)


@njit(**SCALARS)
def write(scores, factor, shift, dlogits):
    """dlogits = factor scores - shift."""
    for j in range(scores.size):
        dlogits[j] = narrow(factor * scores[j] - shift, dlogits[j])


@njit(**SCALARS)
def add(scores, factor, shift, result):
    """result += factor scores - shift."""
    for j in range(scores.size):
        result[j] += factor * scores[j] - shift


def forward(task, elements, index, sources):
    """Process one part of the rows of logits (rows, width); if makes_gradient, the gradient overwrites the logits.

    all_scores and all_dbias are work space (num_parts, width); bias and the rows of all_dbias may be empty.
    """
    arguments = arguments_of(task)
    num_parts, all_logits, bias, targets, ignored, makes_gradient, losses, all_scores, all_dbias = arguments[:9]
    width, smoothing = all_logits.shape[1], np.float32(arguments[9])
    kept = ONE - smoothing
    shift = smoothing / np.float32(width)
    first, last = part_of(len(all_logits), num_parts, index)
    scores, dbias = all_scores[index], all_dbias[index]
    for i in range(first, last):
        logits, target = all_logits[i], targets[i]
        if target == ignored:
            losses[i] = ZERO
            if makes_gradient != 0:
                for j in range(width):
                    logits[j] = narrow(ZERO, logits[j])
            continue
        read(logits, bias, scores)
        top, wanted = largest(scores), scores[target]
        mean = sum_of(scores) / np.float32(width) if smoothing != ZERO else ZERO
        exponentials(scores, top)
        weight = sum_of(scores)
        losses[i] = np.float32(np.log(np.float64(weight))) + top - kept * wanted - smoothing * mean
        if makes_gradient != 0:
            factor = ONE / weight if top == top else NAN
            share = factor * scores[target] - shift - kept
            write(scores, factor, shift, logits)
            logits[target] = narrow(share, logits[target])
            if dbias.size != 0:
                add(scores, factor, shift, dbias)
                dbias[target] -= kept
