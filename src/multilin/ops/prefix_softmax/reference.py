"""The running softmax mean, its state and its weights, computed straight from the equations. Time is quadratic."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from multilin.errors import InputError
from multilin.ops.ring import Slots
from multilin.ops.softmax import softmax


class PrefixSoftmaxState(NamedTuple):
    """Tokens that later positions may read: the last `window - 1` tokens or, without a window, a single summary token.

    One summary token can replace all tokens read so far: its value is their mean, its logit the log of their total
    weight. A state is therefore a sequence of tokens, which the next call reads before the new tokens. Missing tokens
    have the logit -inf, so the shape is the same from the first call on. The numbers are float32 or better. The logit
    of a summary token is float64, because rounding errors of float32 would add up from token to token.
    """

    logits_BSH: Tensor
    values_BSHD: Tensor


class PrefixSoftmaxWindow(PrefixSoftmaxState):
    """The last `window - 1` tokens, which a model may keep in a ring; see `multilin.ops.ring`."""

    slots = Slots(("logits_BSH", "values_BSHD"))


def prefix_softmax(
    logits_BTH: Tensor, values_BTHD: Tensor, *, window: int | None = None, own_logits: Tensor | None = None,
    null_logit: float | None = None, state: PrefixSoftmaxState | None = None, starts: Tensor | None = None,
    needs_state: bool = True,
) -> tuple[Tensor, PrefixSoftmaxState | None]:  # fmt: skip
    """See `multilin.ops.prefix_softmax`."""
    values_BTHD, num_new = values_BTHD.to(logits_BTH.dtype), logits_BTH.shape[1]
    logits_BTH = logits_BTH.double() if window is None else logits_BTH
    logits_BSH, values_BSHD, starts_BS = read_state_first(logits_BTH, values_BTHD, state, starts)
    scores_BHTS = visible_scores(logits_BSH, starts_BS, window, num_new)
    weights_BHTS, log_total_BTH = softmax_and_total(scores_BHTS)
    means_BTHD = weighted_sum(weights_BHTS, values_BSHD)

    if not needs_state:
        state = None
    elif window is None:
        state = PrefixSoftmaxState(log_total_BTH[:, -1:], means_BTHD[:, -1:])
    else:
        state = last_tokens(logits_BSH, values_BSHD, starts_BS, window - 1)
    if own_logits is not None:
        weights_BHTS, _ = softmax_and_total(torch.cat([scores_BHTS, own_logits.transpose(1, 2)[..., None]], dim=-1))
        means_BTHD = weighted_sum(weights_BHTS[..., :-1], values_BSHD)
        means_BTHD = means_BTHD + weights_BHTS[..., -1].transpose(1, 2)[..., None].to(values_BTHD.dtype) * values_BTHD
    elif null_logit is not None:
        means_BTHD = means_BTHD * torch.sigmoid(log_total_BTH - null_logit)[..., None].to(means_BTHD.dtype)
    return means_BTHD, state


def read_state_first(
    logits_BTH: Tensor, values_BTHD: Tensor, state: PrefixSoftmaxState | None, starts_BT: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Put the state's tokens before the new tokens, and pad `starts` to the same length."""
    if state is None:
        return logits_BTH, values_BTHD, starts_BT
    logits = torch.cat([state.logits_BSH.to(logits_BTH.dtype), logits_BTH], dim=1)
    values = torch.cat([state.values_BSHD.to(values_BTHD.dtype), values_BTHD], dim=1)
    if starts_BT is not None:
        starts_BT = pad(starts_BT, (state.logits_BSH.shape[1], 0))
    return logits, values, starts_BT


def last_tokens(
    logits_BTH: Tensor, values_BTHD: Tensor, starts_BT: Tensor | None, num_tokens: int
) -> PrefixSoftmaxState:
    """The last `num_tokens` tokens. The logit is -inf for missing tokens and for tokens of an earlier text."""
    missing = max(num_tokens - logits_BTH.shape[1], 0)
    first = logits_BTH.shape[1] + missing - num_tokens
    if starts_BT is not None:
        text_BT = starts_BT.cumsum(dim=1)
        logits_BTH = logits_BTH.masked_fill((text_BT != text_BT[:, -1:])[..., None], -torch.inf)
    # `pad` copies even if it adds nothing; a view would keep the whole text in memory.
    logits = pad(logits_BTH[:, first:], (0, 0, missing, 0), value=-torch.inf)
    return PrefixSoftmaxState(logits, pad(values_BTHD[:, first:], (0, 0, 0, 0, missing, 0)))


def prefix_softmax_weights(
    logits: Float[Tensor, "B T H"], *, window: int | None = None, own_logits: Float[Tensor, "B T H"] | None = None,
    null_logit: float | None = None, starts: Bool[Tensor, "B T"] | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The weights with which `prefix_softmax` averages the values of a text from its start, in float32 or better.

        y_t = sum_j tokens[t, j] v_j + own[t] v_t

    Returns:
        `tokens` (B, H, T, T), 0 where position t does not read token j, and `own` (B, H, T), None without own logits.
        The null token's weight is 1 minus the sum of these weights. If a position reads nothing, its weights are 0.

    Cost: O(B H T^2) time and memory.
    """
    if own_logits is not None:
        check_own_term(window, null_logit)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores_BHTS = visible_scores(logits, starts, window, logits.shape[1])
    if own_logits is None:
        return softmax(scores_BHTS, null_logit), None
    weights = softmax(torch.cat([scores_BHTS, own_logits.to(logits.dtype).transpose(1, 2)[..., None]], dim=-1))
    return weights[..., :-1], weights[..., -1]


def check_own_term(window: int | None, null_logit: float | None) -> None:
    """Raise InputError if own logits are given with a window or a null token; no architecture needs that."""
    if window is not None or null_logit is not None:
        other = f"window {window}" if window is not None else f"null_logit {null_logit}"
        raise InputError(f"own_logits: given with {other}, but window and null_logit must be None")


def visible_scores(logits_BSH: Tensor, starts_BS: Tensor | None, window: int | None, num_new: int) -> Tensor:
    """The logits that each of the last `num_new` positions reads, (B, H, num_new, S); -inf for tokens not read."""
    position_S = torch.arange(logits_BSH.shape[1], device=logits_BSH.device)
    num_past = logits_BSH.shape[1] - num_new
    distance_TS = position_S[num_past:, None] - position_S[None, :]
    visible_BTS = ((distance_TS >= 0) & (distance_TS < (window or len(position_S))))[None]
    if starts_BS is not None:
        text_BS = starts_BS.cumsum(dim=1)
        visible_BTS = visible_BTS & (text_BS[:, num_past:, None] == text_BS[:, None, :])
    return logits_BSH.transpose(1, 2)[:, :, None, :].masked_fill(~visible_BTS[:, None], -torch.inf)


def softmax_and_total(scores_BHTS: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax weights (B, H, T, S) and logsumexp of the scores (B, T, H); 0 and -inf where no token is visible."""
    empty_BHT1 = (scores_BHTS == -torch.inf).all(dim=-1, keepdim=True)
    log_total_BHT1 = scores_BHTS.masked_fill(empty_BHT1, 0.0).logsumexp(dim=-1, keepdim=True)
    weights_BHTS = torch.exp(scores_BHTS - log_total_BHT1)
    return weights_BHTS, log_total_BHT1.masked_fill(empty_BHT1, -torch.inf)[..., 0].transpose(1, 2)


def weighted_sum(weights_BHTS: Tensor, values_BSHD: Tensor) -> Tensor:
    """The sum over s of weights times values, (B, T, H, D), in the dtype of the values."""
    return (weights_BHTS.to(values_BSHD.dtype) @ values_BSHD.transpose(1, 2)).transpose(1, 2)
