"""The running softmax mean of a few new tokens whose window lies in a ring, in the order of its slots."""

import torch
from torch import Tensor

from multilin.ops.prefix_softmax.reference import softmax_and_total
from multilin.ops.ring import Ring


def prefix_softmax(
    logits_BTH: Tensor, values_BTHD: Tensor, ring: Ring, *, window: int, null_logit: float | None
) -> Tensor:
    """Means (B, T, H, D) as `multilin.ops.prefix_softmax` has them; padding may follow the tokens of a row only."""
    kept_logits, kept_values = ring.tokens
    num_new = logits_BTH.shape[1]
    logits_BHS = kept_logits.to(logits_BTH.dtype).transpose(1, 2)
    index_T = torch.arange(num_new, device=logits_BTH.device)
    distance_TT = index_T[:, None] - index_T
    is_hidden_TT = (distance_TT < 0) | (distance_TT >= window)
    scores_BHTS = logits_BHS[:, :, None].masked_fill((ring.distances(num_new) >= window)[:, None], -torch.inf)
    scores_BHTT = logits_BTH.transpose(1, 2)[:, :, None].masked_fill(is_hidden_TT, -torch.inf)
    weights, log_total_BTH = softmax_and_total(torch.cat([scores_BHTS, scores_BHTT], dim=-1))
    values_BHTD = values_BTHD.to(logits_BTH.dtype).transpose(1, 2)
    means_BHTD = weights[..., :-num_new] @ kept_values.transpose(1, 2) + weights[..., -num_new:] @ values_BHTD
    means_BTHD = means_BHTD.transpose(1, 2)
    if null_logit is None:
        return means_BTHD
    return means_BTHD * torch.sigmoid(log_total_BTH - null_logit)[..., None]
