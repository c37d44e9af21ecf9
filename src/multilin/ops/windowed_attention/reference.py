"""Windowed attention and its weights, as the equation. Quadratic in time, as a definition may be."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from multilin.ops.softmax import softmax
from multilin.ops.windowed_attention.tokens import WindowedAttentionState, all_tokens, last_tokens, texts


def windowed_attention(
    queries_BTHD: Tensor, keys_BTHD: Tensor, values_BTHE: Tensor, *, window: int, scale: float = 1.0,
    slope: float | Tensor = 0.0, hyper: float | Tensor = 0.0, null_key: bool = False, padding: Tensor | None = None,
    state: WindowedAttentionState | None = None, starts: Tensor | None = None, needs_state: bool = True,
) -> tuple[Tensor, WindowedAttentionState | None]:  # fmt: skip
    """See `multilin.ops.windowed_attention`."""
    keys, values, logits_BS = all_tokens(queries_BTHD, keys_BTHD, values_BTHE, padding, state)
    scores_BHTS = visible_scores(queries_BTHD, keys, logits_BS, window, scale, slope, hyper, starts)
    means_BTHE = torch.einsum(
        "bhts,bshe->bthe", softmax(scores_BHTS, 0.0 if null_key else None), values.to(logits_BS.dtype)
    )
    return means_BTHE, last_tokens(keys, values, logits_BS, starts, window) if needs_state else None


def visible_scores(
    queries_BTHD: Tensor, keys_BSHD: Tensor, logits_BS: Tensor, window: int, scale: float, slope: float | Tensor,
    hyper: float | Tensor, starts: Tensor | None,
) -> Tensor:  # fmt: skip
    """Logits (B, H, T, S) of the last T tokens, -inf where a token is not visible."""
    num_all, dtype = keys_BSHD.shape[1], logits_BS.dtype
    num_read = num_all - queries_BTHD.shape[1]
    position_S = torch.arange(num_all, device=keys_BSHD.device)
    distance_TS = position_S[num_read:, None] - position_S[None, :]
    visible_BTS = is_visible(distance_TS, window)[None]
    if starts is not None:
        text_BS = texts(starts, num_all)
        visible_BTS = visible_BTS & (text_BS[:, num_read:, None] == text_BS[:, None, :])
    scores_BHTS = scale * torch.einsum("bthd,bshd->bhts", queries_BTHD.to(dtype), keys_BSHD.to(dtype))
    scores_BHTS = scores_BHTS + decay(distance_TS, slope, hyper, dtype) + logits_BS[:, None, None, :]
    return scores_BHTS.masked_fill(~visible_BTS[:, None], -torch.inf)


def is_visible(distance: Tensor, window: int) -> Tensor:
    """The strict past of that many tokens; a window of 0 is the token itself."""
    return distance == 0 if window == 0 else (distance >= 1) & (distance <= window)


def decay(distance: Tensor, slope: float | Tensor, hyper: float | Tensor, dtype: torch.dtype) -> Tensor:
    """-slope * d + hyper / d for distances from 1 on, 0 elsewhere."""
    away = distance.clamp(min=1).to(dtype)
    return (hyper / away - slope * away).masked_fill(distance < 1, 0.0)


class WindowedAttentionWeights(NamedTuple):
    """y_t = sum_j tokens[t, j] v_j, and what null takes reads the value 0; together they are 1.

    tokens_BHTS: (B, H, T, T), 0 where t does not read j. null_BHT: (B, H, T), or None where there is no null key. A
    position that reads nothing at all has 0 everywhere.
    """

    tokens_BHTS: Tensor
    null_BHT: Tensor | None


def windowed_attention_weights(
    queries: Float[Tensor, "B T H D"],
    keys: Float[Tensor, "B T H D"],
    *,
    window: int,
    scale: float = 1.0,
    slope: float | Tensor = 0.0,
    hyper: float | Tensor = 0.0,
    null_key: bool = False,
    padding: Bool[Tensor, "B T"] | None = None,
    starts: Bool[Tensor, "B T"] | None = None,
) -> WindowedAttentionWeights:
    """The weights of `windowed_attention` with these arguments at the start of a text, in float32 or better.

    Cost: O(B H T^2 D) time, O(B H T^2) memory.
    """
    _, _, logits_BT = all_tokens(queries, keys, keys, padding, None)
    scores_BHTS = visible_scores(queries, keys, logits_BT, window, scale, slope, hyper, starts)
    if not null_key:
        return WindowedAttentionWeights(softmax(scores_BHTS), None)
    weights = softmax(torch.cat([scores_BHTS, torch.zeros_like(scores_BHTS[..., :1])], dim=-1))
    return WindowedAttentionWeights(weights[..., :-1], weights[..., -1])
