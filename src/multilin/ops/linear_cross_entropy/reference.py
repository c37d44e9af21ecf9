"""The cross entropy of a linear output layer, computed straight from its equation, with all logits at once."""

import torch
from torch import Tensor


def linear_cross_entropy(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets_N: Tensor, *,
    label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    """See `multilin.ops.linear_cross_entropy`."""
    logits_NV = hidden_ND @ weight_VD.T + (0.0 if bias_V is None else bias_V)
    log_p_NV = torch.log_softmax(logits_NV, dim=-1)
    counted_N = targets_N != -100
    onehot_NV = torch.nn.functional.one_hot(targets_N.clamp(min=0), weight_VD.shape[0]).to(log_p_NV.dtype)
    wanted_NV = (1 - label_smoothing) * onehot_NV + label_smoothing / weight_VD.shape[0]
    return -(wanted_NV * log_p_NV).sum(dim=-1)[counted_N].sum()
