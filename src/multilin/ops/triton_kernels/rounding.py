"""Rounding of float32 tiles to narrower types, the same compiled and interpreted, and products of what is rounded."""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

from multilin.ops.triton_kernels.parts import dot, nearest_bf16

MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2^23: a sum with it has no digits behind the point


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """To the nearest number of this type, ties to even."""
    if dtype == tl.bfloat16:
        x = nearest_bf16(x)
    return x.to(dtype)


@triton.jit
def nearest(x):
    """The nearest whole number, ties to even, for magnitudes below 2^22."""
    return (x + MAGIC) - MAGIC


@triton.jit
def divide(x, scale):
    """x / scale as IEEE has it; where the scale is 0, or not finite, 0: such a scale shows by itself."""
    is_usable = (scale > 0.0) & (scale < float("inf"))
    return tl.where(is_usable, tl.div_rn(tl.where(is_usable, x, 0.0), tl.where(is_usable, scale, 1.0)), 0.0)


@triton.jit
def magnitude(x):
    """The bits of |x|, ordered as the numbers are, with nan above all: its maximum hides none."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def multiply(left, right):
    """The matrix product in int32 for int8 tiles, else in float32."""
    if left.dtype == tl.int8:
        return tl.dot(left, right, out_dtype=tl.int32)
    return dot(left, right)
