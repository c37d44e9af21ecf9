"""The exponential in kernels."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from multilin.ops.numba_kernels.intrinsics import SCALARS

ZERO, ONE = np.float32(0), np.float32(1)

_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_C2, _C3, _C4 = np.float32(0.5), np.float32(1.6666665459e-1), np.float32(4.1665795894e-2)
_C5, _C6, _C7 = np.float32(8.3334519073e-3), np.float32(1.3981999507e-3), np.float32(1.9875691500e-4)
_SMALLEST = np.float32(-87.0)
_BIAS = np.int32(127)


@intrinsic
def _round(typing_context: Any, number: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.call(builder.module.declare_intrinsic("llvm.rint", [ir.FloatType()]), arguments)

    return types.float32(types.float32), generate


@intrinsic
def _power_of_two(typing_context: Any, exponent: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(builder.shl(arguments[0], ir.Constant(ir.IntType(32), 23)), ir.FloatType())

    return types.float32(types.int32), generate


@njit(**SCALARS)
def exp_negative(x: Any) -> Any:
    """e^x for x <= 0 in float32, 0 below -87; the polynomial of Cephes' expf, which the compiler can vectorise."""
    bounded = x if x > _SMALLEST else _SMALLEST
    n = _round(bounded * _LOG2_E)
    r = bounded - n * _LN2_HIGH
    r = r - n * _LN2_LOW
    p = _C7 * r + _C6
    p = p * r + _C5
    p = p * r + _C4
    p = p * r + _C3
    p = p * r + _C2
    p = p * r * r + r + ONE
    result = p * _power_of_two(np.int32(n) + _BIAS)
    return result if x > _SMALLEST else ZERO
