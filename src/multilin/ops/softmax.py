"""A softmax whose gradient keeps its digits where one weight is nearly 1, as strong decays make it."""

from typing import Any

import torch
from torch import Tensor


def softmax(scores: Tensor, null_key: bool = False) -> Tensor:
    """Softmax over the last axis, 0 where all scores are -inf; a null key takes its share of weight e^0."""
    weights: Tensor = _Softmax.apply(scores, null_key)
    return weights


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, null_key: bool) -> Tensor:
        top = scores.amax(dim=-1, keepdim=True)
        top = top.clamp(min=0.0) if null_key else top.masked_fill(top == -torch.inf, 0.0)
        weights = torch.exp(scores - top)
        null_weight = torch.exp(-top) if null_key else torch.zeros_like(top)
        total = weights.sum(dim=-1, keepdim=True)
        total = total + null_weight if null_key else total.masked_fill(total == 0, 1.0)
        ctx.save_for_backward(weights / total, null_weight / total)
        return weights / total

    @staticmethod
    def backward(ctx: Any, *dweights: Tensor) -> tuple[Tensor, None]:
        """p (g - sum p g) with g counted from its value at the largest weight, where the difference would cancel."""
        weights, null_weight = ctx.saved_tensors
        origin = dweights[0].gather(-1, weights.argmax(dim=-1, keepdim=True))
        shifted = dweights[0] - origin
        mean = (weights * shifted).sum(dim=-1, keepdim=True) - null_weight * origin
        return weights * (shifted - mean), None
