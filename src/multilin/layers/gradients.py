"""Gradients of unit size."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


def normalize_gradient(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """x itself; its gradient g becomes g / rms(g), with one root mean square over all of it, and 0 stays 0.

    Between layers it keeps gradients in the range of half-precision numbers, at the price that the gradients of the
    parameters before it lose their common scale. The mean square is taken in float32 or better, of g over its largest
    magnitude, so that it neither overflows nor vanishes. Source: TScale (Foreseerr).
    """
    result: Tensor = _NormalizeGradient.apply(x)
    return result


class _NormalizeGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        wide = gradients[0].to(torch.promote_types(gradients[0].dtype, torch.float32))
        largest = wide.abs().amax()
        scaled = wide / torch.where(largest == 0, 1.0, largest)
        mean_square = scaled.square().mean()
        return (scaled * torch.where(mean_square == 0, 1.0, mean_square).rsqrt()).to(gradients[0].dtype)
