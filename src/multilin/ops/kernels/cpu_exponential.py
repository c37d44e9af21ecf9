"""The exponential in CPU kernels."""

# mypy: allow-untyped-defs, allow-incomplete-defs

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from multilin.ops.kernels.cpu_intrinsics import SCALARS, number_of

ZERO, ONE = np.float32(0), np.float32(1)

_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_C2, _C3, _C4 = np.float32(0.5), np.float32(1.6666665459e-1), np.float32(4.1665795894e-2)
_C5, _C6, _C7 = np.float32(8.3334519073e-3), np.float32(1.3981999507e-3), np.float32(1.9875691500e-4)
_SMALLEST = np.float32(-87.0)
_BIAS, _MANTISSA_BITS = np.int32(127), np.int32(23)


@intrinsic
def nearest(typing_context, number):
    """The nearest whole number, ties to even."""

    def generate(context, builder, signature, arguments):
        return builder.call(builder.module.declare_intrinsic("llvm.rint", [ir.FloatType()]), arguments)

    return types.float32(types.float32), generate


@njit(**SCALARS)
def exp_negative(x):
    """e^x for x <= 0 in float32, 0 below -87; the polynomial of Cephes' expf, which the compiler can vectorise."""
    bounded = x if x > _SMALLEST else _SMALLEST
    n = nearest(bounded * _LOG2_E)
    r = bounded - n * _LN2_HIGH
    r = r - n * _LN2_LOW
    p = _C7 * r + _C6
    p = p * r + _C5
    p = p * r + _C4
    p = p * r + _C3
    p = p * r + _C2
    p = p * r * r + r + ONE
    result = p * number_of(np.int32((np.int32(n) + _BIAS) << _MANTISSA_BITS))
    return result if x > _SMALLEST else ZERO
