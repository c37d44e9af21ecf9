"""Steps of kernels that several ops take."""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl

from multilin.ops.triton_kernels import is_interpreted

INTERPRETED = tl.constexpr(is_interpreted())
# Three products of tf32 tensor cores give a float32 one to about 1e-6; AMD's have no tf32.
FLOAT32_PRODUCTS = tl.constexpr("ieee" if torch.version.hip else "tf32x3")


@triton.jit
def dot(left, right):
    """The matrix product in float32; float32 tiles are multiplied as such, others on the tensor cores of their type."""
    if INTERPRETED:
        # NumPy knows no bf16: the interpreter would multiply the bits.
        return tl.dot(left.to(tl.float32), right.to(tl.float32), input_precision="ieee")
    return tl.dot(left, right, input_precision=FLOAT32_PRODUCTS)


@triton.jit
def nearest_bf16(numbers):
    """The nearest numbers that bf16 has: the interpreter, unlike a GPU, cuts off the bits that bf16 lacks."""
    if INTERPRETED:
        bits = numbers.to(tl.float32).to(tl.uint32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        numbers = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
    return numbers


@triton.jit
def rounded(numbers, like):
    """The numbers in the type of the tile `like`, to nearest even."""
    if like.dtype == tl.bfloat16:
        numbers = nearest_bf16(numbers)
    return numbers.to(like.dtype)


@triton.jit
def store_rounded(p_out, numbers, mask):
    """Store in the type that the pointers have, to nearest even."""
    if p_out.dtype.element_ty == tl.bfloat16:
        numbers = nearest_bf16(numbers)
    tl.store(p_out, numbers.to(p_out.dtype.element_ty), mask)
