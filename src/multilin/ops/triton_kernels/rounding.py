"""Rounding of float32 tiles to narrower types, the same compiled and interpreted."""

from typing import Any

import triton
import triton.language as tl

from multilin.ops.triton_kernels.parts import INTERPRETED

MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2^23: a sum with it has no digits behind the point


@triton.jit
def narrow(x: Any, dtype: tl.constexpr) -> Any:
    """To the nearest number of this type, ties to even."""
    if INTERPRETED and dtype == tl.bfloat16:
        # The interpreter cuts the digits off that bf16 has no room for.
        bits = x.to(tl.int32, bitcast=True)
        x = (bits + 0x7FFF + ((bits >> 16) & 1)).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def nearest(x: Any) -> Any:
    """The nearest whole number, ties to even, for magnitudes below 2^22."""
    return (x + MAGIC) - MAGIC
