"""The longest match beside an exported graph, in NumPy: see `multilin.ops.longest_match`."""

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]


def longest_matches(
    ring: Tokens, num_read: NDArray[np.int64], tokens: Tokens, counts: NDArray[np.int64], window: int, longest: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Search each row.

    Args:
        ring: (rows, slots) earlier tokens as ids + 1, token number n in slot n mod slots; 0 is no token.
        num_read: (rows,) number of earlier tokens.
        tokens: (rows, T) new tokens, as ids + 1.
        counts: (rows,) number of new tokens of each row; those behind have no match.
        window, longest: see `multilin.ops.longest_match`.

    Returns:
        The predicted ids and the lengths of the matches, (rows, T) each.
    """
    predicted, length = np.zeros(tokens.shape, np.int64), np.zeros(tokens.shape, np.int64)
    num_slots = ring.shape[1]
    for row, (read, count) in enumerate(zip(num_read.tolist(), counts.tolist(), strict=True)):
        first = read % num_slots  # the slot of the oldest token
        text = np.concatenate([ring[row, first:], ring[row, :first], tokens[row, :count]])
        for time in range(count):
            now = num_slots + time
            predicted[row, time], length[row, time] = _look_up(text, now, max(now - window, 0), longest)
    return predicted, length


def _look_up(text: Tokens, now: int, lowest: int, longest: int) -> tuple[int, int]:
    """The predicted id and the length of the longest match of the suffix that ends at place `now`."""
    places, length = (text[lowest:now] == text[now]).nonzero()[0] + lowest, 0
    found = -1
    while len(places):
        found, length = int(places[-1]), length + 1
        if length == longest or text[now - length] == 0:
            break
        places = places[places >= lowest + length]
        places = places[text[places - length] == text[now - length]]
    return (int(text[found + 1]) - 1, length) if length else (0, 0)
