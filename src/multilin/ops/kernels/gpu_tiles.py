"""Tiles in GPU kernels: loaded, multiplied and stored."""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl

from multilin.ops.kernels.gpu_rounding import INTERPRETED, store_rounded

# Three products of tf32 tensor cores give a float32 one to about 1e-6; AMD's have no tf32.
FLOAT32_PRODUCTS = tl.constexpr("ieee" if torch.version.hip else "tf32x3")


@triton.jit
def dot(left, right):
    """The matrix product: in int32 for int8 tiles, else in float32, with the precision that the tiles have."""
    if left.dtype == tl.int8:
        return tl.dot(left, right, out_dtype=tl.int32)
    if INTERPRETED:
        # NumPy knows no bf16: the interpreter would multiply the bits.
        return tl.dot(left.to(tl.float32), right.to(tl.float32), input_precision="ieee")
    return tl.dot(left, right, input_precision=FLOAT32_PRODUCTS)


@triton.jit
def load_tile(p_tile, o_t, m_t, stride, o_d, m_d):
    """A vector (numbers o_d) for each position o_t, 0 outside the masks."""
    return tl.load(p_tile + o_t[:, None].to(tl.int64) * stride + o_d[None, :], m_t[:, None] & m_d[None, :], 0.0)


@triton.jit
def store_tile(p_tile, o_t, m_t, stride, o_d, m_d, b_tile):
    """Store what `load_tile` would load, in the type that the pointer has."""
    p_out = p_tile + o_t[:, None].to(tl.int64) * stride + o_d[None, :]
    store_rounded(p_out, b_tile, m_t[:, None] & m_d[None, :])


@triton.jit
def finite(top):
    """A running maximum that can be subtracted: 0 while there is none."""
    return tl.where(tl.abs(top) == float("inf"), 0.0, top)


@triton.jit
def inverse(total):
    """1 / total, 0 for a total of 0."""
    return tl.where(total > 0, 1.0 / tl.where(total > 0, total, 1.0), 0.0)
