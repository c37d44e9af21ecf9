"""The running softmax mean of a few new tokens whose window lies in a ring, in the order of its slots."""

import torch
from torch import Tensor

from multilin.ops.ring import Ring
from multilin.ops.softmax import softmax


def prefix_softmax(
    logits_BTH: Tensor, values_BTHD: Tensor, ring: Ring, *, window: int, null_logit: float | None
) -> Tensor:
    """Means (B, T, H, D) as `multilin.ops.prefix_softmax` has them; padding may follow the tokens of a row only."""
    kept_logits, kept_values = ring.tokens
    num_new = logits_BTH.shape[1]
    scores_BHTS = kept_logits.to(logits_BTH.dtype).transpose(1, 2)[:, :, None]
    scores_BHTT = logits_BTH.transpose(1, 2)[:, :, None]
    if num_new > 1 or ring.num_kept >= window:  # otherwise the next token reads all that is kept
        index_T = torch.arange(num_new, device=logits_BTH.device)
        distance_TT = index_T[:, None] - index_T
        is_hidden_TT = (distance_TT < 0) | (distance_TT >= window)
        scores_BHTS = scores_BHTS.masked_fill((ring.distances(num_new) >= window)[:, None], -torch.inf)
        scores_BHTT = scores_BHTT.masked_fill(is_hidden_TT, -torch.inf)
    weights = softmax(torch.cat([scores_BHTS, scores_BHTT], dim=-1), null_logit)
    values_BHTD = values_BTHD.to(logits_BTH.dtype).transpose(1, 2)
    means_BHTD = weights[..., :-num_new] @ kept_values.transpose(1, 2) + weights[..., -num_new:] @ values_BHTD
    return means_BHTD.transpose(1, 2)
