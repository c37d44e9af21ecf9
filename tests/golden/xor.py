"""Combiners as the original implementations of 3Lin and TScale hold them: over pairs (left i xor b, right i)."""

import torch
from jaxtyping import Float
from torch import Tensor

from multilin.errors import InputError


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
