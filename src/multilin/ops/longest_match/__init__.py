"""Longest match: the longest suffix of the text so far that occurred before, and the token that followed it there."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from multilin.errors import InputError
from multilin.ops.dispatch import Backend, Op
from multilin.ops.kernels import why_no_numba
from multilin.ops.longest_match import cpu, portable, reference
from multilin.ops.ring import Ring, Slots
from multilin.ops.shapes import check_shapes

__all__ = ["LONGEST_MATCH", "MatchState", "longest_match"]

LONGEST_MATCH = Op(
    "longest_match",
    [
        Backend("numba (tables of hashes)", cpu.longest_match, "cpu", why_not=why_no_numba),
        Backend("portable (PyTorch, sorted suffixes)", portable.sorted_suffixes),
        Backend("reference (Python)", reference.longest_match),
    ],
    special_cases=[Backend("portable (few tokens)", portable.few_tokens, "cuda", refuses=portable.refuses_many)],
)


class MatchState(NamedTuple):
    """The last `window` tokens of each row, (B, window) int32: the id + 1, or 0 where there is no token."""

    tokens_BS: Tensor

    @property
    def slots(self) -> Slots:
        """The tokens are a window."""
        return Slots(("tokens_BS",))


def longest_match(
    ids: Int[Tensor, "B T"],
    *,
    window: int,
    longest: int,
    starts: Bool[Tensor, "B T"] | None = None,
    padding: Bool[Tensor, "B T"] | None = None,
    state: MatchState | Ring | None = None,
    needs_state: bool = True,
) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B T"], MatchState | None]:
    """Find what followed the longest earlier occurrence of the last tokens.

    For position t, l_t is the largest l <= longest for which a position j < t exists with

        ids[j - i] = ids[t - i] for all i < l,    and    j - l + 1 >= t - window

    so the occurrence lies in the `window` tokens before t. The most recent such j gives the prediction ids[j + 1].

    Args:
        ids: (B, T) int64 token ids; -1 equals no other token.
        window: number of earlier tokens to search, at least 1.
        longest: length of the longest suffix to look up, at least 1.
        starts: (B, T) True where a text begins inside a row; nothing before it is found after it.
        padding: (B, T) True at padding, which is no part of the text.
        state: the state that an earlier call returned, or a ring with its tokens (see `multilin.ops.ring`).
        needs_state: False if the text ends here: None is returned in place of the state.

    Returns:
        predicted: (B, T) int64 predicted ids; 0 where nothing was found, and at padding.
        length: (B, T) int64 lengths l_t of the matches; 0 where nothing was found, and at padding.
        state: the last `window` tokens of each row. If `state` was a ring, only the new tokens.

    Raises:
        InputError: a window or longest match below 1, or shapes that do not fit.

    Cost: on a CPU O(B (T + window) longest) time, or O(B T window) for few tokens; the state has 4 window bytes a row.
    Source: the match model of PAQ (M. Mahoney), used as a feature of the tokens by TScale.
    """
    if window < 1 or longest < 1:
        raise InputError(f"match: window {window} and longest {longest} given, but both must be at least 1")
    check_shapes(("starts", starts, ids.shape), ("padding", padding, ids.shape))
    tokens_BT = (ids + 1).int()
    order_BT = None
    if padding is not None:  # tokens first, padding behind them
        order_BT = padding.int().argsort(dim=1, stable=True)
        tokens_BT = tokens_BT.masked_fill(padding, 0).gather(1, order_BT)
        starts = None if starts is None else (starts & ~padding).gather(1, order_BT)
    history_BS, first_B = _history(tokens_BT, state)
    begins_BT = None
    if starts is not None:
        place_T = torch.arange(ids.shape[1], device=ids.device) + history_BS.shape[1]
        begins_BT = torch.where(starts, place_T, 0).cummax(dim=1).values
    predicted_BT, length_BT = LONGEST_MATCH(
        tokens_BT, history_BS, first_B, begins_BT, window, longest, dtype=tokens_BT.dtype
    )
    after = _after(tokens_BT, state, begins_BT, padding, window) if needs_state else None
    if order_BT is not None:
        predicted_BT = torch.zeros_like(predicted_BT).scatter(1, order_BT, predicted_BT)
        length_BT = torch.zeros_like(length_BT).scatter(1, order_BT, length_BT)
    return predicted_BT, length_BT, after


def _history(tokens_BT: Tensor, state: MatchState | Ring | None) -> tuple[Tensor, Tensor]:
    """The earlier tokens (B, S), and the slot of the oldest one of each row."""
    zeros_B = torch.zeros(len(tokens_BT), dtype=torch.long, device=tokens_BT.device)
    if isinstance(state, Ring):
        return state.tokens.tokens_BS, state.num_read_B % state.num_slots
    return tokens_BT[:, :0] if state is None else state.tokens_BS, zeros_B


def _after(
    tokens_BT: Tensor, state: MatchState | Ring | None, begins_BT: Tensor | None, padding: Tensor | None, window: int
) -> MatchState:
    """The state after these tokens, which come first in each row."""
    if isinstance(state, Ring):
        return MatchState(tokens_BT)
    kept_BS = tokens_BT.new_zeros(len(tokens_BT), window) if state is None else state.tokens_BS
    num_before, all_BN = (0 if state is None else window), torch.cat([kept_BS, tokens_BT], dim=1)
    num_all = all_BN.shape[1]
    if begins_BT is not None and tokens_BT.shape[1]:
        place_N = torch.arange(num_all, device=all_BN.device) - (window - num_before)
        all_BN = all_BN.masked_fill(place_N < begins_BT[:, -1:], 0)
    if padding is None:
        return MatchState(all_BN[:, num_all - window :].clone())
    counts_B1 = (~padding).sum(dim=1, keepdim=True)
    return MatchState(all_BN.gather(1, counts_B1 + torch.arange(window, device=all_BN.device)))
