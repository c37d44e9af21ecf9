"""Block outer products as one matrix product over the expanded pairs, which are not kept for the backward pass."""

from typing import Any

import torch
from torch import Tensor


def block_outer(left: Tensor, right: Tensor, weight: Tensor) -> Tensor:
    """See `multilin.ops.block_outer`."""
    device = left.device.type
    if torch.is_autocast_enabled(device):
        low = torch.get_autocast_dtype(device)
        left, right, weight = left.to(low), right.to(low), weight.to(low)
    result: Tensor = _BlockOuter.apply(left, right, weight)
    return result


class _BlockOuter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(left, right, weight)
        return _pairs(left, right) @ weight.flatten(1).T

    @staticmethod
    def backward(ctx: Any, *dresults: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        left, right, weight = ctx.saved_tensors
        dresult = dresults[0]
        dpairs = (dresult @ weight.flatten(1)).unflatten(-1, weight.shape[1:])
        dleft = (dpairs * right[..., None, :]).sum(dim=-1)
        dright = (dpairs * left[..., None]).sum(dim=-2)
        rows = dresult.reshape(-1, dresult.shape[-1])
        dweight = rows.T @ _pairs(left, right).reshape(len(rows), -1)
        return dleft, dright, dweight.view_as(weight)


def _pairs(left: Tensor, right: Tensor) -> Tensor:
    return (left[..., None] * right[..., None, :]).flatten(-3)
