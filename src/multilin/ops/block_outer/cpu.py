"""Block outer products on a CPU: pairs, and gradients from theirs, are made in one pass over memory each.

Pairs are in memory as (rows, pairs), for a chunk of rows at a time; see `portable`.
"""

from typing import Any

import torch
from torch import Tensor

from multilin.ops.block_outer.portable import in_chunks
from multilin.ops.kernels import LazyModule
from multilin.ops.kernels.operators import operator

DTYPES = (torch.float32, torch.bfloat16)
_kernels, _launch = LazyModule("multilin.ops.block_outer.cpu_kernels"), LazyModule("multilin.ops.kernels.cpu_launch")


def block_outer(left: Tensor, right: Tensor, weight: Tensor) -> Tensor:
    """See `multilin.ops.block_outer`; all of one type."""
    return in_chunks(left, right, weight, expand, contract)


def expand(left_RNK: Tensor, right_RNJ: Tensor) -> Tensor:
    """The products of pairs, (R, N K J)."""
    pairs: Tensor = expand_pairs(left_RNK, right_RNJ)
    return pairs.flatten(1)


def contract(dresult_RD: Tensor, weight: Tensor, left_RNK: Tensor, right_RNJ: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of left and right."""
    dpairs = (dresult_RD @ weight.flatten(1)).view(-1, *weight.shape[1:])
    dleft, dright = contract_pairs(dpairs, left_RNK, right_RNJ)
    return dleft, dright


@operator("expand_pairs", lambda left, right: left.new_empty(*left.shape, right.shape[-1]))
def expand_pairs(left: Tensor, right: Tensor) -> Tensor:
    """The products of pairs, (R, N, K, J)."""
    pairs = torch.empty((*left.shape, right.shape[-1]), dtype=left.dtype)
    _launch.launch_parts(_kernels.expand, left.dtype, pairs.numel(), **_factors(left, right), pairs=pairs)
    return pairs


@operator("contract_pairs", lambda _, left, right: (left.new_empty(left.shape), right.new_empty(right.shape)))
def contract_pairs(dpairs: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of left and right from that of their products."""
    dleft, dright = torch.empty(left.shape, dtype=left.dtype), torch.empty(right.shape, dtype=right.dtype)
    _launch.launch_parts(
        _kernels.contract, left.dtype, dpairs.numel(), **_factors(left, right), pairs=dpairs.contiguous(),
        dleft=dleft, dright=dright,
    )  # fmt: skip
    return dleft, dright


def _factors(left: Tensor, right: Tensor) -> dict[str, Any]:
    (rows, blocks, width), other = left.shape, right.shape[-1]
    sizes = {"num_rows": rows, "num_blocks": blocks, "left_width": width, "right_width": other}
    return {**sizes, "left": left.contiguous(), "right": right.contiguous()}
