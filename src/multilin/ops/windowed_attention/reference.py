"""Windowed attention, its state and its weights, computed straight from the equation. Time is quadratic."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from multilin.ops.ring import Slots
from multilin.ops.softmax import softmax


class WindowedAttentionState(NamedTuple):
    """The last `window` tokens, in float32 or better; a logit is -inf for a missing or hidden token, else 0."""

    keys_BSHD: Tensor
    values_BSHE: Tensor
    logits_BS: Tensor

    @property
    def slots(self) -> Slots:
        """All fields are windows."""
        return Slots(("keys_BSHD", "values_BSHE", "logits_BS"), are_multiplied=True)


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


def all_tokens(
    queries: Tensor, keys: Tensor, values: Tensor, padding: Tensor | None, state: WindowedAttentionState | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and logits of the state's tokens, then the new tokens; logits are in the dtype to compute in."""
    dtype = torch.promote_types(torch.promote_types(queries.dtype, values.dtype), torch.float32)
    logits = torch.zeros(keys.shape[:2], dtype=dtype, device=keys.device)
    if padding is not None:
        logits = logits.masked_fill(padding, -torch.inf)
    if state is None:
        return keys, values, logits
    pairs = zip(state, (keys, values, logits), strict=True)
    keys, values, logits = (torch.cat([x.to(dtype) for x in pair], dim=1) for pair in pairs)
    return keys, values, logits


def last_tokens(
    keys: Tensor, values: Tensor, logits: Tensor, starts: Tensor | None, num_tokens: int
) -> WindowedAttentionState:
    """The last `num_tokens` tokens; the logit of missing tokens and of tokens of an earlier text is -inf."""
    missing = max(num_tokens - keys.shape[1], 0)
    first = keys.shape[1] + missing - num_tokens
    if starts is not None:
        text_BS = texts(starts, keys.shape[1])
        logits = logits.masked_fill(text_BS != text_BS[:, -1:], -torch.inf)
    keys, values = (pad(x[:, first:].to(logits.dtype), (0, 0, 0, 0, missing, 0)) for x in (keys, values))
    return WindowedAttentionState(keys, values, pad(logits[:, first:], (missing, 0), value=-torch.inf))


def texts(starts_BT: Tensor, length: int, dtype: torch.dtype | None = None) -> Tensor:
    """The index of each token's text (B, length); the state's tokens, which precede the new tokens, are in text 0."""
    return pad(starts_BT.cumsum(dim=1, dtype=dtype), (length - starts_BT.shape[1], 0))


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
    """True for the `window` tokens before the position; for a window of 0, True for the token itself."""
    return distance == 0 if window == 0 else (distance >= 1) & (distance <= window)


def decay(distance: Tensor, slope: float | Tensor, hyper: float | Tensor, dtype: torch.dtype) -> Tensor:
    """-slope * d + hyper / d for distances from 1 on, 0 elsewhere."""
    away = distance.clamp(min=1).to(dtype)
    return (hyper / away - slope * away).masked_fill(distance < 1, 0.0)


def windowed_attention_weights(
    queries: Float[Tensor, "B T H D"], keys: Float[Tensor, "B T H D"], *, window: int, scale: float = 1.0,
    slope: float | Tensor = 0.0, hyper: float | Tensor = 0.0, null_key: bool = False,
    padding: Bool[Tensor, "B T"] | None = None, starts: Bool[Tensor, "B T"] | None = None,
) -> Float[Tensor, "B H T T"]:  # fmt: skip
    """The weights with which `windowed_attention` averages the values of a text from its start, float32 or better.

    A weight is 0 where position t does not read token j. The null key's weight is 1 minus the sum of these weights.

    Cost: O(B H T^2 D) time, O(B H T^2) memory.
    """
    _, _, logits_BT = all_tokens(queries, keys, keys, padding, None)
    scores_BHTS = visible_scores(queries, keys, logits_BT, window, scale, slope, hyper, starts)
    return softmax(scores_BHTS, 0.0 if null_key else None)
