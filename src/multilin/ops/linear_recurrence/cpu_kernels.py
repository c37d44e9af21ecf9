"""Kernels of the recurrence of minGRU, for one text and some of its channels.

Forward: h_t = q_t h_(t-1) + z_t c_t with c = g(u), z = sigmoid(k), q = 1 - z = sigmoid(-k). Backward, from the end:

    s_t = dh_t + q_(t+1) s_(t+1)        dk_t = s_t (c_t - h_(t-1)) z_t q_t        du_t = s_t z_t g'(u_t)

where g' is 1 for u >= 0, else c (1 - c). Recomputing z, q and c from the inputs costs less than storing them.
"""

import numpy as np
from numba import njit

from multilin.ops.kernels.cpu_intrinsics import ONE, SCALARS, ZERO, arguments_of, exp_negative, narrow, part_of, widen

HALF = np.float32(0.5)
LANES = 16  # pieces have a multiple of this many channels


@njit(forceinline=True, **SCALARS)
def shares(k):
    """z = sigmoid(k) and q = sigmoid(-k), both to full precision."""
    decay = exp_negative(-abs(k))
    larger = ONE / (ONE + decay)
    smaller = decay * larger
    return (larger if k >= ZERO else smaller), (smaller if k >= ZERO else larger)


@njit(forceinline=True, **SCALARS)
def keep(x, z, q):
    """q x, computed as x - z x for small z, because a q near 1 would have the same rounding error at every token."""
    return x - z * x if z < q else q * x


@njit(forceinline=True, **SCALARS)
def positive(u):
    """g(u)."""
    growth = exp_negative(min(u, ZERO))
    return u + HALF if u >= ZERO else growth / (ONE + growth)


@njit(**SCALARS)
def read_token(k, u, h, hidden):
    """Compute h after a token, and store it as the token's hidden state."""
    for i in range(h.size):
        z, q = shares(widen(k[i]))
        h[i] = keep(h[i], z, q) + z * positive(widen(u[i]))
        hidden[i] = narrow(h[i], hidden[i])


@njit(**SCALARS)
def unread_token(k, u, h_before, dhidden, s, dk, du):
    """Compute the gradients of a token; s becomes q_t s_t, for the token before it."""
    for i in range(s.size):
        x = widen(u[i])
        z, q = shares(widen(k[i]))
        c = positive(x)
        total = widen(dhidden[i]) + s[i]
        dk[i] = narrow(total * (c - widen(h_before[i])) * z * q, dk[i])
        du[i] = narrow(total * z * (ONE if x >= ZERO else c * (ONE - c)), du[i])
        s[i] = keep(total, z, q)


@njit
def channels_of(num_pieces, piece, width):
    """The first channel of a piece, and the first channel after it."""
    first, last = part_of((width + LANES - 1) // LANES, num_pieces, piece)
    return first * LANES, min(last * LANES, width)


def forward(task, elements, index, sources):
    """For one text and piece of its channels: hidden states (texts * positions, width), and the last hidden state."""
    _, num_pieces, befores, inputs, starts, hidden, after = arguments_of(task)
    (num_texts, width), text = befores.shape, index // num_pieces
    first, last = channels_of(num_pieces, index % num_pieces, width)
    num_time, h = len(inputs) // num_texts, after[text, first:last]
    h[:] = befores[text, first:last]
    for row in range(text * num_time, (text + 1) * num_time):
        if starts.size > 0 and starts[row] != ZERO:
            h[:] = ZERO
        k, u = inputs[row, first:last], inputs[row, width + first : width + last]
        read_token(k, u, h, hidden[row, first:last])


def backward(task, elements, index, sources):
    """For one text and piece of its channels: the gradients of the inputs, and of h before the first input."""
    _, num_pieces, befores, inputs, starts, nothing, hidden, dhidden, dafter, dinputs, dbefore = arguments_of(task)
    (num_texts, width), text = befores.shape, index // num_pieces
    first, last = channels_of(num_pieces, index % num_pieces, width)
    num_time, s = len(inputs) // num_texts, dbefore[text, first:last]
    s[:] = dafter[text, first:last]
    for row in range((text + 1) * num_time - 1, text * num_time - 1, -1):
        is_start = starts.size > 0 and starts[row] != ZERO
        k, u = inputs[row, first:last], inputs[row, width + first : width + last]
        dk, du = dinputs[row, first:last], dinputs[row, width + first : width + last]
        if is_start:
            unread_token(k, u, nothing[first:last], dhidden[row, first:last], s, dk, du)
            s[:] = ZERO
        elif row > text * num_time:
            unread_token(k, u, hidden[row - 1, first:last], dhidden[row, first:last], s, dk, du)
        else:
            unread_token(k, u, befores[text, first:last], dhidden[row, first:last], s, dk, du)
