"""Losses and their gradient for a chunk of logits, in PyTorch operations."""

import torch
from torch import Tensor

IGNORED = -100  # the target of ignored rows


def losses_and_gradient(
    logits_NV: Tensor, bias_V: Tensor | None, targets_N: Tensor, label_smoothing: float, makes_gradient: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cross entropy of each row of logits + bias, and its gradient.

    Args:
        logits_NV: products of hidden states and weights; they may be overwritten.
        bias_V, targets_N, label_smoothing: as for `linear_cross_entropy`.
        makes_gradient: False if only the losses are used; the other results are then undefined.

    Returns:
        Losses (N,) in nats; the gradient of their sum with respect to the logits (N, V), in the logits' dtype; and its
        gradient with respect to the bias (V,), None if the bias needs no gradient.
    """
    scores_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    if bias_V is not None:
        scores_NV = scores_NV + bias_V
    losses_N = torch.nn.functional.cross_entropy(
        scores_NV, targets_N, reduction="none", label_smoothing=label_smoothing, ignore_index=IGNORED
    )
    if not makes_gradient:
        return losses_N, logits_NV, None
    # softmax(scores) minus the target distribution; 0 in ignored rows.
    dscores_NV = torch.softmax(scores_NV, dim=-1)
    if label_smoothing:
        dscores_NV -= label_smoothing / scores_NV.shape[1]
    target_N1 = targets_N.clamp(min=0)[:, None]
    dscores_NV.scatter_add_(1, target_N1, torch.full_like(target_N1, label_smoothing - 1.0, dtype=dscores_NV.dtype))
    dscores_NV *= (targets_N != IGNORED)[:, None]
    dbias_V = dscores_NV.sum(dim=0) if bias_V is not None and bias_V.requires_grad else None
    return losses_N, dscores_NV.to(logits_NV.dtype), dbias_V
