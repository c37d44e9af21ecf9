"""Steps on tiles in GPU kernels, such as load, round, multiply and store, both compiled and interpreted."""

import torch
import triton
import triton.language as tl

from multilin.ops.kernels import is_interpreted

INTERPRETED = tl.constexpr(is_interpreted())
MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2^23: a float32 sum with it has no fraction
# Three tf32 products give a float32 product to about 1e-6; AMD's tensor cores have no tf32.
FLOAT32_PRODUCTS = tl.constexpr("ieee" if torch.version.hip else "tf32x3")


@triton.jit
def narrow(numbers, dtype: tl.constexpr):
    """Round to the nearest numbers of this type, ties to even."""
    if INTERPRETED and dtype == tl.bfloat16:
        # The interpreter, unlike a GPU, cuts off the bits that bf16 lacks.
        bits = numbers.to(tl.float32).to(tl.uint32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        numbers = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
    return numbers.to(dtype)


@triton.jit
def store_rounded(p_out, numbers, mask):
    """Store numbers, rounded to the type of the pointers."""
    tl.store(p_out, narrow(numbers, p_out.dtype.element_ty), mask)


@triton.jit
def nearest(x):
    """The nearest whole number, ties to even, for magnitudes below 2^22."""
    return (x + MAGIC) - MAGIC


@triton.jit
def divide(x, scale):
    """x / scale, rounded as in IEEE 754; 0 where the scale is 0, negative or not finite."""
    is_usable = (scale > 0.0) & (scale < float("inf"))
    return tl.where(is_usable, tl.div_rn(tl.where(is_usable, x, 0.0), tl.where(is_usable, scale, 1.0)), 0.0)


@triton.jit
def magnitude(x):
    """The bits of |x| as an integer, in the same order as the numbers; nan is the largest, so a maximum keeps it."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def dot(left, right, float32_products: tl.constexpr = FLOAT32_PRODUCTS):
    """The matrix product: in int32 for int8 tiles, else in float32. `float32_products`: precision for float32 tiles."""
    if left.dtype == tl.int8:
        return tl.dot(left, right, out_dtype=tl.int32)
    if INTERPRETED:
        # NumPy knows no bf16: the interpreter would multiply the bits.
        return tl.dot(left.to(tl.float32), right.to(tl.float32), input_precision="ieee")
    return tl.dot(left, right, input_precision=float32_products)


@triton.jit
def load_row(p_row, o_t, m_t, stride, other):
    """Load one number for each position o_t; outside the mask, use `other`."""
    return tl.load(p_row + o_t.to(tl.int64) * stride, mask=m_t, other=other)


@triton.jit
def load_tile(p_tile, o_t, m_t, stride, o_d, m_d):
    """Load a vector (components o_d) for each position o_t, 0 outside the masks."""
    return tl.load(p_tile + o_t[:, None].to(tl.int64) * stride + o_d[None, :], m_t[:, None] & m_d[None, :], 0.0)


@triton.jit
def store_tile(p_tile, o_t, m_t, stride, o_d, m_d, b_tile):
    """Store a tile where `load_tile` would load it, in the type of the pointer."""
    p_out = p_tile + o_t[:, None].to(tl.int64) * stride + o_d[None, :]
    store_rounded(p_out, b_tile, m_t[:, None] & m_d[None, :])


@triton.jit
def finite(top):
    """A running maximum that can be subtracted: infinite values become 0."""
    return tl.where(tl.abs(top) == float("inf"), 0.0, top)


@triton.jit
def inverse(total):
    """1 / total, 0 for a total of 0."""
    return tl.where(total > 0, 1.0 / tl.where(total > 0, total, 1.0), 0.0)
