"""The weights with which a prefix softmax reads, one by one: for looking at, quadratic in time and memory."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from multilin.ops.softmax import softmax as shares


class PrefixSoftmaxWeights(NamedTuple):
    """y_t = sum_j tokens[t, j] v_j + own[t] v_t, and what null takes reads the value 0; together they are 1.

    tokens_BHTS: (B, H, T, T), 0 where t does not read j. own_BHT, null_BHT: (B, H, T), or None where there is no such
    term. A position that reads nothing at all has 0 everywhere.
    """

    tokens_BHTS: Tensor
    own_BHT: Tensor | None
    null_BHT: Tensor | None


def prefix_softmax_weights(
    logits: Float[Tensor, "B T H"],
    *,
    window: int | None = None,
    own_logits: Float[Tensor, "B T H"] | None = None,
    null_logit: float | None = None,
    starts: Bool[Tensor, "B T"] | None = None,
) -> PrefixSoftmaxWeights:
    """The weights of `prefix_softmax` with these arguments at the start of a text, in float32 or better.

    Cost: O(B H T^2) time and memory.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    place_T = torch.arange(logits.shape[1], device=logits.device)
    distance_TS = place_T[:, None] - place_T[None, :]
    visible_BTS = ((distance_TS >= 0) & (distance_TS < (window or len(place_T))))[None]
    if starts is not None:
        text_BT = starts.cumsum(dim=1)
        visible_BTS = visible_BTS & (text_BT[:, :, None] == text_BT[:, None, :])
    scores_BHTS = logits.transpose(1, 2)[:, :, None, :].masked_fill(~visible_BTS[:, None], -torch.inf)
    further = [] if own_logits is None else [own_logits.to(logits.dtype).transpose(1, 2)[..., None]]
    if null_logit is not None:
        further.append(torch.full_like(scores_BHTS[..., :1], null_logit))
    weights = shares(torch.cat([scores_BHTS, *further], dim=-1))
    num_tokens = logits.shape[1]
    own_BHT = None if own_logits is None else weights[..., num_tokens]
    return PrefixSoftmaxWeights(weights[..., :num_tokens], own_BHT, None if null_logit is None else weights[..., -1])
