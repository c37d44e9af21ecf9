"""Int8 products and their straight-through gradients."""

from typing import Any

import torch
from torch import Tensor

from multilin.ops.dispatch import result_dtype
from multilin.ops.int8.rounding import Rounded
from multilin.ops.kernels import refuse_second_derivative


class Int8Linear(torch.autograd.Function):
    """See `int8_linear`; `steps` is like `portable.PortableSteps`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, values: Tensor, scale: Tensor, bias: Tensor | None,
        factor: float, backward: str, steps: Any,
    ) -> Tensor:  # fmt: skip
        """Compute the product, and keep x as int8 for the backward pass."""
        rounded = steps.round_rows(x.reshape(-1, x.shape[-1]))
        result = steps.scaled_product(rounded, values.t(), scale * factor, bias, result_dtype(x))
        ctx.save_for_backward(rounded.values, rounded.scale, values, scale)
        ctx.options = x.shape, x.dtype, None if weight is None else weight.dtype, factor, backward, steps
        return result.view(*x.shape[:-1], len(values))

    @staticmethod
    def backward(ctx: Any, *dresults: Tensor) -> tuple[Any, ...]:
        """dx = dy W, dw = dy^T x, with the rounded x and W."""
        refuse_second_derivative("int8_linear")
        x_values, x_scale, values, scale = ctx.saved_tensors
        shape, x_dtype, weight_dtype, factor, backward, steps = ctx.options
        dresult = dresults[0].reshape(-1, dresults[0].shape[-1])
        dx = dweight = None
        if ctx.needs_input_grad[0]:
            dx = steps.gradient_of_rows(dresult, values, scale * factor, backward, x_dtype).view(shape)
        if weight_dtype is not None and ctx.needs_input_grad[1]:
            dweight = steps.gradient_of_weight(dresult, Rounded(x_values, x_scale * factor), backward, weight_dtype)
        dbias = dresult.sum(dim=0, dtype=x_scale.dtype) if ctx.needs_input_grad[4] else None
        return dx, dweight, None, None, dbias, None, None, None


class Int8BlockOuter(torch.autograd.Function):
    """See `int8_block_outer`; `steps` is like `portable.PortableSteps`."""

    @staticmethod
    def forward(
        ctx: Any, left: Tensor, right: Tensor, weight: Tensor | None, values: Tensor, scale: Tensor,
        factor: float, backward: str, steps: Any,
    ) -> Tensor:  # fmt: skip
        """Compute the contraction; keep left and right for the backward pass, but not the products of pairs."""
        dtype = result_dtype(left)
        lefts, rights = (x.to(dtype).reshape(-1, *x.shape[-2:]) for x in (left, right))
        result = steps.outer(lefts, rights, values, scale * factor, dtype)
        ctx.save_for_backward(lefts, rights, values, scale)
        ctx.options = left.shape, right.shape, None if weight is None else weight.dtype, factor, backward, steps
        return result.view(*left.shape[:-2], len(values))

    @staticmethod
    def backward(ctx: Any, *dresults: Tensor) -> tuple[Any, ...]:
        """The gradients of left, right and weight; the products of pairs are rounded again."""
        refuse_second_derivative("int8_block_outer")
        lefts, rights, values, scale = ctx.saved_tensors
        left_shape, right_shape, weight_dtype, factor, backward, steps = ctx.options
        dresult = dresults[0].reshape(-1, len(values))
        dleft = dright = dweight = None
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            dleft, dright = steps.gradients_of_factors(dresult, lefts, rights, values, scale * factor, backward)
            dleft, dright = dleft.view(left_shape), dright.view(right_shape)
        if weight_dtype is not None and ctx.needs_input_grad[2]:
            dweight = steps.gradient_of_pairs_weight(dresult, lefts, rights, factor, backward, weight_dtype)
        return dleft, dright, dweight, None, None, None, None, None
