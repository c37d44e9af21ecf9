"""All products of pairs inside aligned blocks, contracted by a matrix."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from multilin.errors import InputError
from multilin.ops import numba_kernels, triton_kernels
from multilin.ops.block_outer import cpu, expand, gpu, gpu_launch
from multilin.ops.dispatch import Backend, Op

__all__ = ["BLOCK_OUTER", "block_outer", "xor_combiner", "xor_weight"]

BLOCK_OUTER = Op(
    "block_outer",
    [
        Backend(
            "numba (compiled pairs, recomputed backward)",
            cpu.block_outer,
            device="cpu",
            dtypes=(torch.float32, torch.bfloat16),
            why_not=numba_kernels.why_not,
        ),
        Backend(
            "triton (pairs in registers, recomputed backward)",
            gpu.block_outer,
            device="cuda",
            dtypes=gpu.DTYPES,
            why_not=triton_kernels.why_not,
            refuses=gpu_launch.refuses,
        ),
        Backend("portable (PyTorch, products recomputed backward)", expand.block_outer),
    ],
)


def block_outer(
    left: Float[Tensor, "*batch N K"],
    right: Float[Tensor, "*batch N J"],
    weight: Float[Tensor, "D N K J"],
) -> Float[Tensor, "*batch D"]:
    """Contract the outer products of the blocks of two vectors with a matrix.

        y_d = sum over n, k, j of weight[d, n, k, j] * left[n, k] * right[n, j]

    One op for three systems: with K = J a power of two, the pairs (i, i xor b), b < K, are exactly all pairs inside
    aligned blocks of K, so 3Lin's combiner is K = 16, TScale's K = 4, and ELiTA's feed-forward is one block of D x 8.

    Args:
        left: (..., N, K) N blocks of K numbers.
        right: (..., N, J) N blocks of J numbers.
        weight: (D, N, K, J) the contraction.

    Returns:
        (..., D) in the dtype of `left` (of the matrix products under autocast).

    Raises:
        InputError: shapes that do not fit.

    Cost: 2 N K J D multiplications and additions per row, three times that with backward. The N K J products of a row
    are held for a chunk of rows only, about 2^21 numbers, and are made again backward.
    Source: TScale and 3Lin (combiners), ELiTA (two-factor feed-forward).
    """
    if weight.shape[1:] != (*left.shape[-2:], right.shape[-1]) or left.shape[:-1] != right.shape[:-1]:
        raise InputError(
            f"weight: shape {tuple(weight.shape)} given for blocks {tuple(left.shape[-2:])} and "
            f"{tuple(right.shape[-2:])}, but it must be (D, N, K, J)"
        )
    device = left.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else left.dtype
    left, right, weight = left.to(dtype), right.to(dtype), weight.to(dtype)
    compute: Any = BLOCK_OUTER.backend_for(left.device, dtype, (right.shape[-1],)).compute
    result: Tensor = compute(left, right, weight)
    return result


def xor_weight(combiner: Float[Tensor, "D B n"], *, block: int) -> Float[Tensor, "D N K K"]:
    """The weight of `block_outer` for a combiner over pairs (left i xor b, right i), written as combiner[d, b, i].

    y_d = sum over b < block, i of combiner[d, b, i] * left[i xor b] * right[i].
    """
    num_out, num_b, num_i = combiner.shape
    if num_b != block or num_i % block:
        raise InputError(
            f"combiner: shape {tuple(combiner.shape)} given, but it must be (D, {block}, a multiple of it)"
        )
    index = torch.arange(block, device=combiner.device)
    by_pair = combiner.view(num_out, block, num_i // block, block).permute(0, 2, 1, 3)
    # weight[d, n, k, j] = combiner[d, k xor j, n * block + j]
    return by_pair[:, :, index[:, None] ^ index[None, :], index[None, :].expand(block, block)]


def xor_combiner(weight: Float[Tensor, "D N K K"]) -> Float[Tensor, "D K n"]:
    """The combiner of which `xor_weight` makes this weight."""
    num_out, num_blocks, block, _ = weight.shape
    index = torch.arange(block, device=weight.device)
    by_pair = weight[:, :, index[:, None] ^ index[None, :], index[None, :].expand(block, block)]
    return by_pair.permute(0, 2, 1, 3).reshape(num_out, block, num_blocks * block)
