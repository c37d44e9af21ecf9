"""The definition of the longest match, in Python."""

import torch
from torch import Tensor


def longest_match(
    tokens_BT: Tensor, history_BS: Tensor, first_B: Tensor, begins_BT: Tensor | None, window: int, longest: int
) -> tuple[Tensor, Tensor]:
    """See `multilin.ops.longest_match`, for ids + 1, where 0 is no token.

    Args:
        tokens_BT: the new tokens.
        history_BS: the tokens before them, in a ring.
        first_B: slot of the oldest token of each row.
        begins_BT: number of tokens in history and new ones before the text that each token belongs to; None for 0.
        window, longest: see `multilin.ops.longest_match`.
    """
    found = torch.zeros(2, *tokens_BT.shape, dtype=torch.long)
    for row, new in enumerate(tokens_BT.tolist()):
        first = int(first_B[row])
        text = [*history_BS[row, first:].tolist(), *history_BS[row, :first].tolist(), *new]
        for time in range(len(new)):
            now = time + history_BS.shape[1]
            begin = 0 if begins_BT is None else int(begins_BT[row, time])
            found[:, row, time] = torch.tensor(look_up(text, now, max(now - window, begin), longest))
    predicted_BT, length_BT = found.to(tokens_BT.device)
    return predicted_BT, length_BT


def look_up(text: list[int], now: int, lowest: int, longest: int) -> tuple[int, int]:
    """The predicted id and the length of the longest match of the suffix that ends at place `now`, from `lowest` on."""
    predicted, best = 0, 0
    for place in range(now - 1, lowest - 1, -1):
        length = 0
        while length < longest and place - length >= lowest and text[place - length] == text[now - length] != 0:
            length += 1
        if length > best:
            predicted, best = text[place + 1] - 1, length
    return predicted, best
