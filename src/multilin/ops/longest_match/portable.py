"""The longest match in PyTorch: earlier occurrences of suffixes of each length by sorting, or by comparing all."""

import torch
from torch import Tensor
from torch.nn.functional import pad

MOST = 16  # most new tokens whose suffixes are compared with every earlier place


def refuses_many(tokens_BT: Tensor, *_: object, **options: object) -> str | None:
    """The `Backend.refuses` of a special case: take only few tokens."""
    return None if tokens_BT.shape[1] <= MOST else "there are many tokens"


def sorted_suffixes(
    tokens_BT: Tensor, history_BS: Tensor, first_B: Tensor, begins_BT: Tensor | None, window: int, longest: int
) -> tuple[Tensor, Tensor]:
    """See `reference.longest_match`.

    Suffixes of length l get a number in the order of (number of the suffix of length l - 1 that ends one token before,
    last token). Among equal suffixes, a stable sort leaves the most recent earlier one in front of each.
    """
    text_BN, lowest_BN = _text(tokens_BT, history_BS, first_B, begins_BT, window)
    num_all = text_BN.shape[1]
    place_N = torch.arange(num_all, device=text_BN.device)
    number_BN, run_BN = torch.zeros_like(text_BN), _run_lengths(text_BN)
    length_BN, found_BN = torch.zeros_like(text_BN), torch.zeros_like(text_BN)
    for length in range(1, longest + 1):
        key_BN = pad(number_BN[:, :-1], (1, 0)) * (2**31) + text_BN
        sorted_BN, order_BN = key_BN.sort(dim=1, stable=True)
        is_same_BN = pad(sorted_BN[:, 1:] == sorted_BN[:, :-1], (1, 0))
        number_BN = torch.zeros_like(order_BN).scatter(1, order_BN, (~is_same_BN).cumsum(dim=1))
        before_BN = torch.where(is_same_BN, pad(order_BN[:, :-1], (1, 0)), -1)
        before_BN = torch.zeros_like(order_BN).scatter(1, order_BN, before_BN)
        fits_BN = (before_BN - length + 1 >= lowest_BN) & (run_BN >= length) & (place_N >= length)
        length_BN = torch.where(fits_BN, length, length_BN)
        found_BN = torch.where(fits_BN, before_BN, found_BN)
    return _predictions(text_BN, found_BN, length_BN, tokens_BT.shape[1])


def few_tokens(
    tokens_BT: Tensor, history_BS: Tensor, first_B: Tensor, begins_BT: Tensor | None, window: int, longest: int
) -> tuple[Tensor, Tensor]:
    """See `reference.longest_match`; compares the suffix of each new token with the suffix of every earlier place."""
    text_BN, lowest_BN = _text(tokens_BT, history_BS, first_B, begins_BT, window)
    num_time, num_all = tokens_BT.shape[1], text_BN.shape[1]
    place_N = torch.arange(num_all, device=text_BN.device)
    now_T = place_N[num_all - num_time :]
    length_BTN = torch.zeros(len(text_BN), num_time, num_all, dtype=torch.long, device=text_BN.device)
    fits_BTN = (place_N < now_T[:, None]).expand_as(length_BTN)
    for back in range(min(longest, num_all)):
        shifted_BN = pad(text_BN[:, : num_all - back], (back, 0))
        now_BT = shifted_BN[:, num_all - num_time :, None]
        fits_BTN = fits_BTN & (shifted_BN[:, None] == now_BT) & (now_BT != 0)
        fits_BTN = fits_BTN & (place_N - back >= lowest_BN[:, num_all - num_time :, None])
        length_BTN = length_BTN + fits_BTN
    best_BT, found_BT = (length_BTN * num_all + place_N).max(dim=2)  # the most recent of the longest
    found_BN = pad(found_BT, (num_all - num_time, 0))
    return _predictions(text_BN, found_BN, pad(best_BT // num_all, (num_all - num_time, 0)), num_time)


def _text(
    tokens_BT: Tensor, history_BS: Tensor, first_B: Tensor, begins_BT: Tensor | None, window: int
) -> tuple[Tensor, Tensor]:
    """All tokens in order, (B, N) int64, and the first place that each may read."""
    num_slots, num_time = history_BS.shape[1], tokens_BT.shape[1]
    if num_slots:
        slot_S = torch.arange(num_slots, device=tokens_BT.device)
        history_BS = history_BS.gather(1, (first_B[:, None] + slot_S) % num_slots)
    text_BN = torch.cat([history_BS, tokens_BT], dim=1).long()
    lowest_BN = (torch.arange(num_slots + num_time, device=tokens_BT.device) - window).clamp(min=0).expand_as(text_BN)
    if begins_BT is not None:
        lowest_BN = lowest_BN.maximum(pad(begins_BT, (num_slots, 0)))
    return text_BN, lowest_BN


def _run_lengths(text_BN: Tensor) -> Tensor:
    """The number of tokens up to each place without a gap."""
    place_N = torch.arange(1, text_BN.shape[1] + 1, device=text_BN.device)
    return place_N - torch.where(text_BN == 0, place_N, 0).cummax(dim=1).values


def _predictions(text_BN: Tensor, found_BN: Tensor, length_BN: Tensor, num_time: int) -> tuple[Tensor, Tensor]:
    """The ids that follow the found places, and the lengths, of the last `num_time` places."""
    first = text_BN.shape[1] - num_time
    found_BT, length_BT = found_BN[:, first:], length_BN[:, first:]
    following_BT = text_BN.gather(1, (found_BT + 1).clamp(max=max(text_BN.shape[1] - 1, 0)))
    return torch.where(length_BT > 0, following_BT - 1, 0), length_BT
