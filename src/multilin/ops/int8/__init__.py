"""Int8 products: numbers are rounded to int8 with a scale, multiplied exactly, and scaled back."""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from multilin.errors import InputError
from multilin.ops.block_outer import check_blocks
from multilin.ops.block_outer.cpu import refuses_vectors
from multilin.ops.dispatch import Backend, Op, cpu_kernels, gpu_kernels, result_dtype
from multilin.ops.int8 import cpu, gpu
from multilin.ops.int8.portable import LONGEST_SUM, PortableSteps
from multilin.ops.int8.products import Int8BlockOuter, Int8Linear
from multilin.ops.int8.rounding import (
    BLOCK,
    LEVELS,
    Rounded,
    dequantize,
    dequantize_blocks,
    quantize,
    quantize_blocks,
    round_weight,
    simulate_rounding,
)
from multilin.ops.kernels import refuses_eager

__all__ = [
    "BLOCK", "INT8", "LEVELS", "Rounded", "dequantize", "dequantize_blocks", "int8_block_outer", "int8_linear",
    "quantize", "quantize_blocks", "round_weight", "simulate_rounding",
]  # fmt: skip

INT8 = Op(
    "int8",
    [
        cpu_kernels("around torch._int_mm", cpu.CpuSteps),
        gpu_kernels("rounded in one pass, scaled in the product", gpu.GpuSteps),
        Backend("portable (PyTorch around torch._int_mm)", PortableSteps),
    ],
    special_cases=[
        Backend("portable (PyTorch, in graphs)", PortableSteps, "cpu", refuses=refuses_eager),
        Backend("portable (PyTorch, no vectors)", PortableSteps, "cpu", refuses=refuses_vectors),
    ],
)

Backward = Literal["float", "int8"]
Levels = Literal["int8", "sim_4bit", "sim_2bit", "ternary"]


def int8_linear(
    x: Float[Tensor, "*batch n"],
    weight: Float[Tensor, "m n"] | Rounded,
    bias: Float[Tensor, " m"] | None = None,
    *,
    factor: float = 1.0,
    levels: Levels = "int8",
    backward: Backward = "float",
    parameter: Tensor | None = None,
) -> Float[Tensor, "*batch m"]:
    """Apply a linear map whose matrix product is computed in int8.

        y = factor * sx_t * sw * (X W^T) + b        X = round(x_t / sx_t),  W = round(w / sw),  X W^T exact in int32

    with one scale per row of x (a token) and one for the weight. Tokens are rounded one by one, so the result at a
    token does not depend on the tokens read with it.

    The gradient is straight-through: the gradient of the rounded product, as if rounding were the identity. With
    backward "int8", both products of the gradient are int8, too. dy is rounded stochastically, without bias. For dx, dy
    gets one scale per token. For dweight, a sum over rows, dy is first multiplied by the row scales of x and gets one
    scale per output. The random numbers come from torch's default generator of the CPU.

    Args:
        x: (..., n) float.
        weight: (m, n) float; or Rounded, weights that stay int8.
        bias: (m,) added to the result, or None.
        factor: multiplies the product.
        levels: levels of the rounded weight; all except "int8" simulate coarser storage, see `simulate_rounding`.
        backward: arithmetic of the gradient's products.
        parameter: float tensor of the weight's shape that gets the gradient of a Rounded weight; None computes no such
            gradient. Numbers in `parameter` are not read.

    Returns:
        (..., m) in the dtype of x, or of autocast.

    Raises:
        InputError: shapes that do not fit, or n > 131072, where int32 could overflow.

    Cost: 2 m n int8 operations per row; n bytes per row are kept for the backward pass.
    Source: TScale (int8 model matrices and normalised states).
    """
    values = weight.values if isinstance(weight, Rounded) else weight
    if values.ndim != 2 or values.shape[1] != x.shape[-1]:
        raise InputError(
            f"weight: shape {tuple(values.shape)} given for x of width {x.shape[-1]}, but it must be (m, n)"
        )
    rounded, parameter = _rounded(weight, levels, parameter)
    # For a float32 x, kernels also depend on the dtype of the result.
    dtype = result_dtype(x) if x.dtype == torch.float32 else x.dtype
    steps = INT8.backend_for(x.device, dtype, (x,)).compute
    return Int8Linear.apply(x, parameter, *rounded, bias, factor, backward, steps)


def int8_block_outer(
    left: Float[Tensor, "*batch N K"],
    right: Float[Tensor, "*batch N J"],
    weight: Float[Tensor, "D N K J"] | Rounded,
    *,
    factor: float = 1.0,
    levels: Levels = "int8",
    backward: Backward = "float",
    parameter: Tensor | None = None,
) -> Float[Tensor, "*batch D"]:
    """Compute `block_outer` with a matrix product in int8.

        y_d = factor * sp * sw * sum over n, k, j of W[d, n, k, j] * P[n, k, j]
        P[n, k, j] = round(left[n, k] * right[n, j] / sp)

    The products of pairs are rounded per row, and never stored as floats. Gradients are computed as in `int8_linear`.

    Args:
        left, right, weight: as for `block_outer`; weight may be Rounded.
        factor, levels, backward, parameter: as for `int8_linear`.

    Returns:
        (..., D) in the dtype of `left`, or of autocast.

    Raises:
        InputError: shapes that do not fit, or sums of more than 131072 products.
    """
    check_blocks(left, right, weight.values if isinstance(weight, Rounded) else weight)
    rounded, parameter = _rounded(weight, levels, parameter)
    steps = INT8.backend_for(left.device, result_dtype(left), (left, right)).compute
    return Int8BlockOuter.apply(left, right, parameter, *rounded, factor, backward, steps)


def _rounded(weight: Tensor | Rounded, levels: str, parameter: Tensor | None) -> tuple[Rounded, Tensor | None]:
    """The rounded weight, and the tensor that gets its gradient."""
    length = (weight.values if isinstance(weight, Rounded) else weight)[0].numel()
    if length > LONGEST_SUM:
        raise InputError(
            f"weight: rows of {length} numbers given, but int32 can overflow in sums above {LONGEST_SUM} products"
        )
    return (weight, parameter) if isinstance(weight, Rounded) else (round_weight(weight, levels), weight)
