"""The weights with which windowed attention reads, one by one: for looking at, quadratic in time and memory."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from multilin.ops.softmax import softmax
from multilin.ops.windowed_attention.reference import visible_scores
from multilin.ops.windowed_attention.tokens import all_tokens


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
