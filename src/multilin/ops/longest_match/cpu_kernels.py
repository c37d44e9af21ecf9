"""Kernels of `longest_match`. A row is read from a copy with its tokens in order."""

import numpy as np
from numba import njit

from multilin.ops.kernels.cpu_intrinsics import EXACT, arguments_of, part_of

FACTOR, SPREAD = np.uint64(6364136223846793005), np.uint64(0x9E3779B97F4A7C15)


@njit(**EXACT)
def copy_in_order(text, history, first, tokens):
    """Write the history, a ring whose oldest token is in slot `first`, and the new tokens."""
    num_slots = len(history)
    for slot in range(num_slots):
        text[slot] = history[(first + slot) % num_slots]
    text[num_slots:] = tokens


@njit(**EXACT)
def lowest_of(now, window, begins, time):
    """The first place that the token at place `now`, the new one number `time`, may read."""
    lowest = max(now - window, 0)
    return max(lowest, begins[time]) if len(begins) and time >= 0 else lowest


@njit(**EXACT)
def compare_text(text, num_slots, begins, window, longest, predicted, length):
    """Compare the suffix of each new token with each earlier place."""
    for time in range(len(predicted)):
        now = num_slots + time
        lowest, best, found = lowest_of(now, window, begins, time), 0, 0
        token = text[now]
        for place in range(now - 1, lowest - 1, -1):
            if text[place] != token or token == 0:
                continue
            size = 1
            while (
                size < longest and place - size >= lowest
                and text[place - size] == text[now - size] and text[place - size] != 0
            ):  # fmt: skip
                size += 1
            if size > best:
                best, found = size, place
                if best == longest:
                    break
        length[time], predicted[time] = best, text[found + 1] - 1 if best else 0


@njit(**EXACT)
def find(table, text, now, size, start):
    """The slot of the suffix of this size that ends at place `now`, or the empty slot where it belongs."""
    slot, mask = start, len(table) - 1
    while table[slot]:
        place, equal = table[slot] - 1, True
        for back in range(size):
            if text[place - back] != text[now - back]:
                equal = False
                break
        if equal:
            break
        slot = (slot + 1) & mask
    return slot


@njit(**EXACT)
def look_up_text(text, num_slots, begins, window, longest, predicted, length):
    """Keep the last place of every suffix of each size in a table of hashes, with open addressing."""
    bits = 1
    while (1 << bits) < 2 * len(text):
        bits += 1
    tables, hashes = np.zeros((longest, 1 << bits), np.int32), np.zeros(longest + 1, np.uint64)
    run = 0
    for now in range(len(text)):
        token = text[now]
        run = run + 1 if token else 0
        lowest, best, found = lowest_of(now, window, begins, now - num_slots), 0, 0
        for size in range(min(run, longest), 0, -1):
            hashes[size] = hashes[size - 1] * FACTOR + np.uint64(token)
            start = np.int64((hashes[size] * SPREAD) >> np.uint64(64 - bits))
            slot = find(tables[size - 1], text, now, size, start)
            place = tables[size - 1, slot] - 1
            if best == 0 and place - size + 1 >= lowest:
                best, found = size, place
            tables[size - 1, slot] = now + 1
        if now >= num_slots:
            time = now - num_slots
            length[time], predicted[time] = best, text[found + 1] - 1 if best else 0


def search(task, elements, index, sources):
    """Search in one part of the rows: compare each token, or look up in tables."""
    num_parts, compares, tokens, history, first, begins, window, longest, predicted, length = arguments_of(task)
    text, num_slots = np.empty(history.shape[1] + tokens.shape[1], np.int32), history.shape[1]
    begin, end = part_of(len(tokens), num_parts, index)
    for row in range(begin, end):
        copy_in_order(text, history[row], first[row], tokens[row])
        if compares:
            compare_text(text, num_slots, begins[row], window, longest, predicted[row], length[row])
        else:
            look_up_text(text, num_slots, begins[row], window, longest, predicted[row], length[row])
