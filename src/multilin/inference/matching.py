"""The longest match beside an exported graph: see `multilin.ops.longest_match`. The text of a row is a string.

Token t is the character chr(t + 1), so that Python's own search finds a suffix among thousands of tokens in
microseconds.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def read_tokens(text: str, ids: Sequence[int], window: int, longest: int) -> tuple[str, list[int], list[int]]:
    """Add tokens to the text of a row.

    Args:
        text: the last `window` tokens, or all if there are fewer.
        ids: the new tokens.
        window, longest: see `multilin.ops.longest_match`.

    Returns:
        The text with the new tokens; and for each the predicted id and the length of the match, 0 and 0 without one.
    """
    predicted, lengths = [], []
    for token in ids:
        text = text[-window:] + chr(token + 1)
        last, length, end = len(text) - 1, 0, len(text) - 1
        while length < longest:
            place = text.rfind(text[last - length :], 0, end)
            if place < 0:
                break
            length, end = length + 1, place + length + 1  # a longer suffix does not occur behind its own end
        lengths.append(length)
        predicted.append(ord(text[end]) - 1 if length else 0)
    return text[-window:], predicted, lengths


def to_window(texts: Sequence[str], window: int) -> NDArray[np.int32]:
    """The texts as PyTorch's state has them: (rows, window) ids + 1, with zeros in front."""
    tokens = np.zeros((len(texts), window), np.int32)
    for row, text in zip(tokens, texts, strict=True):
        row[window - len(text) :] = [ord(character) for character in text]
    return tokens


def from_window(tokens: NDArray[np.int32]) -> list[str]:
    """The texts of the result of `to_window`."""
    return ["".join(map(chr, row[row > 0].tolist())) for row in tokens]
