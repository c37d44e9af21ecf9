"""Windowed attention of a few new tokens whose window lies in a ring, in the order of its slots."""

import torch
from torch import Tensor

from multilin.ops.ring import Ring
from multilin.ops.softmax import softmax
from multilin.ops.windowed_attention.reference import decay, is_visible
from multilin.ops.windowed_attention.tokens import WindowedAttentionState


def windowed_attention(
    queries_BTHD: Tensor, keys_BTHD: Tensor, values_BTHE: Tensor, ring: Ring, *, window: int, scale: float,
    slope: float | Tensor, hyper: float | Tensor, null_key: bool, padding: Tensor | None,
) -> tuple[Tensor, WindowedAttentionState]:  # fmt: skip
    """Means as `multilin.ops.windowed_attention` has them, and the new tokens as `multilin.ops.ring.write` takes them.

    Padding may follow the tokens of a row only.
    """
    kept_keys, kept_values, kept_logits = ring.tokens
    dtype, num_new = kept_keys.dtype, queries_BTHD.shape[1]
    logits_BT = torch.zeros(keys_BTHD.shape[:2], dtype=dtype, device=keys_BTHD.device)
    if padding is not None:
        logits_BT = logits_BT.masked_fill(padding, -torch.inf)
    new = WindowedAttentionState(keys_BTHD.to(dtype), values_BTHE.to(dtype), logits_BT)
    null_logit = 0.0 if null_key else None
    queries_BHTD = queries_BTHD.to(dtype).transpose(1, 2) * scale
    scores_BHTS = queries_BHTD @ kept_keys.permute(0, 2, 3, 1) + kept_logits[:, None, None, :]
    has_decay = not (isinstance(slope, float | int) and isinstance(hyper, float | int) and slope == hyper == 0)
    if num_new > 1 or has_decay:
        scores_BHTS = _weigh(scores_BHTS, ring.distances(num_new)[:, None], window, slope, hyper)
    values_BHSE = kept_values.transpose(1, 2)
    if num_new == 1:  # which does not read itself
        return (softmax(scores_BHTS, null_logit) @ values_BHSE).transpose(1, 2), new
    index_T = torch.arange(num_new, device=keys_BTHD.device)
    scores_BHTT = queries_BHTD @ new.keys_BSHD.permute(0, 2, 3, 1) + logits_BT[:, None, None, :]
    scores_BHTT = _weigh(scores_BHTT, index_T[:, None] - index_T, window, slope, hyper)
    weights = softmax(torch.cat([scores_BHTS, scores_BHTT], dim=-1), null_logit)
    means_BHTE = weights[..., :-num_new] @ values_BHSE + weights[..., -num_new:] @ new.values_BSHE.transpose(1, 2)
    return means_BHTE.transpose(1, 2), new


def _weigh(scores: Tensor, distance: Tensor, window: int, slope: float | Tensor, hyper: float | Tensor) -> Tensor:
    scores = scores + decay(distance, slope, hyper, scores.dtype)
    return scores.masked_fill(~is_visible(distance, window), -torch.inf)
