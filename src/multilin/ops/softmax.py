"""A softmax whose gradient stays precise where one weight is nearly 1, as with strong decays."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from multilin.ops.kernels import is_exported, refuse_second_derivative


def softmax(scores: Tensor, null_logit: float | None = None) -> Tensor:
    """Softmax over the last axis, 0 where all scores are -inf; a null token adds e^null_logit to the divisor."""
    if is_exported():  # one operator in the graph; a null token of almost no weight avoids 0 / 0
        null_logit = torch.finfo(scores.dtype).min if null_logit is None else null_logit
        return pad(scores, (0, 1), value=null_logit).softmax(dim=-1)[..., :-1]
    return _Softmax.apply(scores, null_logit) if scores.shape[-1] else scores


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, null_logit: float | None) -> Tensor:
        top = scores.amax(dim=-1, keepdim=True)
        top = top.masked_fill(top == -torch.inf, 0.0) if null_logit is None else top.clamp(min=null_logit)
        weights = torch.exp(scores - top)
        null_weight = torch.zeros_like(top) if null_logit is None else torch.exp(null_logit - top)
        total = weights.sum(dim=-1, keepdim=True)
        total = total.masked_fill(total == 0, 1.0) if null_logit is None else total + null_weight
        ctx.save_for_backward(weights / total, null_weight / total)
        return weights / total

    @staticmethod
    def backward(ctx: Any, *dweights: Tensor) -> tuple[Tensor, None]:
        """p (g - sum p g); to keep all digits, g at the largest weight is first subtracted from all of g."""
        refuse_second_derivative("softmax")
        weights, null_weight = ctx.saved_tensors
        origin = dweights[0].gather(-1, weights.argmax(dim=-1, keepdim=True))
        shifted = dweights[0] - origin
        mean = (weights * shifted).sum(dim=-1, keepdim=True) - null_weight * origin
        return weights * (shifted - mean), None
