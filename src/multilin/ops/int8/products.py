"""Int8 products and their straight-through gradients."""

from typing import Any

import torch
from torch import Tensor

from multilin.ops.int8.portable import LONGEST_SUM, PortableSteps, multiply


class Int8Linear(torch.autograd.Function):
    """See `int8_linear`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, values: Tensor, scale: Tensor, bias: Tensor | None,
        factor: float, backward: str, steps: Any,
    ) -> Tensor:  # fmt: skip
        """The product; keeps x as int8."""
        rows = x.reshape(-1, x.shape[-1])
        steps = steps_for(steps, rows)
        rounded = steps.round_rows(rows)
        product = multiply(rounded.values, values.t())
        result = steps.scale_rows(product, rounded.scale, scale * factor, bias, result_dtype(x))
        ctx.save_for_backward(rounded.values, rounded.scale, values, scale)
        ctx.described = x.shape, x.dtype, None if weight is None else weight.dtype, factor, backward, steps
        return result.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *dresults: Tensor) -> tuple[Any, ...]:
        """dx = dy W, dw = dy^T x, with the rounded x and W."""
        x_values, x_scale, values, scale = ctx.saved_tensors
        shape, x_dtype, weight_dtype, factor, backward, steps = ctx.described
        dresult = dresults[0].reshape(-1, dresults[0].shape[-1])
        dx = dweight = None
        if ctx.needs_input_grad[0]:
            dx = gradient_of_rows(dresult, values, scale * factor, backward, steps, x_dtype).view(shape)
        if weight_dtype is not None and ctx.needs_input_grad[1]:
            dweight = gradient_of_weight(dresult, x_values, x_scale * factor, backward, steps, weight_dtype)
        dbias = dresult.sum(dim=0, dtype=x_scale.dtype) if ctx.needs_input_grad[4] else None
        return dx, dweight, None, None, dbias, None, None, None


class Int8BlockOuter(torch.autograd.Function):
    """See `int8_block_outer`."""

    @staticmethod
    def forward(
        ctx: Any, left: Tensor, right: Tensor, weight: Tensor | None, values: Tensor, scale: Tensor,
        factor: float, backward: str, steps: Any,
    ) -> Tensor:  # fmt: skip
        """The contraction; keeps left and right, not their products."""
        dtype = result_dtype(left)
        left, right = left.to(dtype), right.to(dtype)
        lefts, rights = left.reshape(-1, *left.shape[-2:]), right.reshape(-1, *right.shape[-2:])
        steps = steps_for(steps, lefts)
        pairs = steps.round_pairs(lefts, rights)
        flat = _flat_weight(values)
        result = steps.scale_rows(multiply(pairs.values, flat.t()), pairs.scale, scale * factor, None, dtype)
        ctx.save_for_backward(lefts, rights, values, scale)
        ctx.described = left.shape, right.shape, None if weight is None else weight.dtype, factor, backward, steps
        return result.view(*left.shape[:-2], -1)

    @staticmethod
    def backward(ctx: Any, *dresults: Tensor) -> tuple[Any, ...]:
        """The pairs are rounded again instead of kept."""
        lefts, rights, values, scale = ctx.saved_tensors
        left_shape, right_shape, weight_dtype, factor, backward, steps = ctx.described
        dresult = dresults[0].reshape(-1, len(values))
        flat = _flat_weight(values)
        dleft = dright = dweight = None
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            if backward == "int8":
                rounded = steps.round_rows_randomly(dresult)
                product, row_scale = multiply(rounded.values, flat), rounded.scale
            else:
                product, row_scale = dresult @ flat.to(dresult.dtype), torch.ones_like(dresult[:, :1])
                steps = PortableSteps
            dleft, dright = steps.contract_pairs(product, row_scale, scale * factor, lefts, rights)
            dleft, dright = dleft.view(left_shape), dright.view(right_shape)
        if weight_dtype is not None and ctx.needs_input_grad[2]:
            steps = ctx.described[-1]
            pairs = steps.round_pairs(lefts, rights)
            dflat = gradient_of_weight(dresult, pairs.values, pairs.scale * factor, backward, steps, weight_dtype)
            depth, blocks, width, other = values.shape
            dweight = dflat.view(depth, width, other, blocks).permute(0, 3, 1, 2)
        return dleft, dright, dweight, None, None, None, None, None


def gradient_of_rows(
    dresult: Tensor, values: Tensor, factor: Tensor, backward: str, steps: Any, dtype: torch.dtype
) -> Tensor:
    """dy W."""
    if backward != "int8":
        return ((dresult @ values.to(dresult.dtype)) * factor).to(dtype)
    rounded = steps.round_rows_randomly(dresult)
    return steps.scale_rows(multiply(rounded.values, values), rounded.scale, factor, None, dtype)


def gradient_of_weight(
    dresult: Tensor, values: Tensor, row_scale: Tensor, backward: str, steps: Any, dtype: torch.dtype
) -> Tensor:
    """dy^T x, x = values * row_scale, in pieces short enough for int32."""
    if backward != "int8":
        return (dresult.t() @ (values * row_scale).to(dresult.dtype)).to(dtype)
    total = None
    for start in range(0, max(len(dresult), 1), LONGEST_SUM):
        part = slice(start, start + LONGEST_SUM)
        rounded = steps.round_columns_randomly(dresult[part], row_scale[part])
        product = multiply(rounded.values.t(), values[part])
        one = torch.ones((), dtype=rounded.scale.dtype, device=product.device)
        piece = steps.scale_rows(product, rounded.scale.t(), one, None, rounded.scale.dtype)
        total = piece if total is None else total + piece
    assert total is not None
    return total.to(dtype)


def steps_for(steps: Any, rows: Tensor) -> Any:
    """The kernels take float32 and bf16, and cannot be traced by torch.compile."""
    takes = getattr(steps, "dtypes", None)
    return steps if (takes is None or rows.dtype in takes) and not torch.compiler.is_compiling() else PortableSteps


def result_dtype(x: Tensor) -> torch.dtype:
    """That of autocast, else that of x."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _flat_weight(values: Tensor) -> Tensor:
    """(D, N, K, J) as (D, K J N), the layout of the pairs."""
    return values.permute(0, 2, 3, 1).reshape(len(values), -1)
