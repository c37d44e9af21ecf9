"""Steps of kernels that several ops take."""

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
