"""Windowed attention, as its equation. Quadratic in time, as a definition may be."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from multilin.ops.windowed_attention.softmax import softmax
from multilin.ops.windowed_attention.tokens import WindowedAttentionState, last_tokens, read_state_first


def windowed_attention(
    queries_BTHD: Tensor,
    keys_BTHD: Tensor,
    values_BTHE: Tensor,
    logits_BT: Tensor,
    *,
    window: int,
    scale: float,
    slope: float | Tensor = 0.0,
    hyper: float | Tensor = 0.0,
    null_key: bool = False,
    state: WindowedAttentionState | None = None,
    starts: Tensor | None = None,
    needs_state: bool = True,
) -> tuple[Tensor, WindowedAttentionState | None]:
    """See `multilin.ops.windowed_attention`; `logits_BT` is -inf at padding, else 0, in the dtype to compute in."""
    num_new, dtype = keys_BTHD.shape[1], logits_BT.dtype
    queries_BTHD, keys_BTHD, values_BTHE = queries_BTHD.to(dtype), keys_BTHD.to(dtype), values_BTHE.to(dtype)
    keys, values, logits_BS = read_state_first(keys_BTHD, values_BTHE, logits_BT, state)
    num_read = keys.shape[1] - num_new

    position_S = torch.arange(keys.shape[1], device=keys.device)
    distance_TS = position_S[num_read:, None] - position_S[None, :]
    visible_BTS = is_visible(distance_TS, window)[None]
    if starts is not None:
        text_BS = pad(starts, (num_read, 0)).cumsum(dim=1)
        visible_BTS = visible_BTS & (text_BS[:, num_read:, None] == text_BS[:, None, :])
    scores_BHTS = scale * torch.einsum("bthd,bshd->bhts", queries_BTHD, keys)
    scores_BHTS = scores_BHTS + decay(distance_TS, slope, hyper, keys.dtype) + logits_BS[:, None, None, :]
    weights_BHTS = softmax(scores_BHTS.masked_fill(~visible_BTS[:, None], -torch.inf), null_key)
    means_BTHE = torch.einsum("bhts,bshe->bthe", weights_BHTS, values)
    return means_BTHE, last_tokens(keys, values, logits_BS, starts, window) if needs_state else None


def is_visible(distance: Tensor, window: int) -> Tensor:
    """The strict past of that many tokens; a window of 0 is the token itself."""
    return distance == 0 if window == 0 else (distance >= 1) & (distance <= window)


def decay(distance: Tensor, slope: float | Tensor, hyper: float | Tensor, dtype: torch.dtype) -> Tensor:
    """-slope * d + hyper / d for distances from 1 on, 0 elsewhere."""
    away = distance.clamp(min=1).to(dtype)
    return (hyper / away - slope * away).masked_fill(distance < 1, 0.0)
