"""Rounding in GPU kernels, the same compiled and interpreted."""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

from multilin.ops.kernels import is_interpreted

INTERPRETED = tl.constexpr(is_interpreted())
MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2^23: a sum with it has no digits behind the point


@triton.jit
def narrow(numbers, dtype: tl.constexpr):
    """To the nearest numbers of this type, ties to even."""
    if INTERPRETED and dtype == tl.bfloat16:
        # The interpreter, unlike a GPU, cuts off the bits that bf16 lacks.
        bits = numbers.to(tl.float32).to(tl.uint32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        numbers = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
    return numbers.to(dtype)


@triton.jit
def store_rounded(p_out, numbers, mask):
    """Store the nearest numbers of the type that the pointers have."""
    tl.store(p_out, narrow(numbers, p_out.dtype.element_ty), mask)


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
