"""The running softmax mean, as its equation. Quadratic in time, as a definition may be."""

import torch
from torch import Tensor

from multilin.ops.prefix_softmax.tokens import PrefixSoftmaxState, last_tokens, read_state_first


def prefix_softmax(
    logits_BTH: Tensor,
    values_BTHD: Tensor,
    *,
    window: int | None = None,
    own_logits: Tensor | None = None,
    null_logit: float | None = None,
    state: PrefixSoftmaxState | None = None,
    starts: Tensor | None = None,
    needs_state: bool = True,
) -> tuple[Tensor, PrefixSoftmaxState | None]:
    """See `multilin.ops.prefix_softmax`."""
    num_new = logits_BTH.shape[1]
    logits_BSH, values_BSHD, starts_BS = read_state_first(logits_BTH, values_BTHD, state, starts)
    num_read = logits_BSH.shape[1] - num_new

    position_S = torch.arange(logits_BSH.shape[1], device=logits_BTH.device)
    distance_TS = position_S[num_read:, None] - position_S[None, :]
    visible_BTS = ((distance_TS >= 0) & (distance_TS < (window or len(position_S))))[None]
    if starts_BS is not None:
        text_BS = starts_BS.cumsum(dim=1)
        visible_BTS = visible_BTS & (text_BS[:, num_read:, None] == text_BS[:, None, :])
    scores_BHTS = logits_BSH.transpose(1, 2)[:, :, None, :].masked_fill(~visible_BTS[:, None], -torch.inf)
    weights_BHTS, log_total_BTH = _softmax(scores_BHTS)
    means_BTHD = torch.einsum("bhts,bshd->bthd", weights_BHTS, values_BSHD)

    if not needs_state:
        state = None
    elif window is None:
        state = PrefixSoftmaxState(log_total_BTH[:, -1:], means_BTHD[:, -1:])
    else:
        state = last_tokens(logits_BSH, values_BSHD, starts_BS, window - 1)
    if own_logits is not None:
        weights_BHTS, log_total_BTH = _softmax(torch.cat([scores_BHTS, own_logits.transpose(1, 2)[..., None]], dim=-1))
        means_BTHD = torch.einsum("bhts,bshd->bthd", weights_BHTS[..., :-1], values_BSHD)
        means_BTHD = means_BTHD + weights_BHTS[..., -1].transpose(1, 2)[..., None] * values_BTHD
    if null_logit is not None:
        means_BTHD = means_BTHD * torch.sigmoid(log_total_BTH - null_logit)[..., None]
    return means_BTHD, state


def _softmax(scores_BHTS: Tensor) -> tuple[Tensor, Tensor]:
    """Weights (B, H, T, S), 0 where nothing is visible, and the log of their total (B, T, H), -inf there."""
    empty_BHT1 = (scores_BHTS == -torch.inf).all(dim=-1, keepdim=True)
    log_total_BHT1 = scores_BHTS.masked_fill(empty_BHT1, 0.0).logsumexp(dim=-1, keepdim=True)
    weights_BHTS = torch.exp(scores_BHTS - log_total_BHT1)
    return weights_BHTS, log_total_BHT1.masked_fill(empty_BHT1, -torch.inf)[..., 0].transpose(1, 2)
