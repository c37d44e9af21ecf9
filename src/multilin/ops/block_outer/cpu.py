"""Block outer products on a CPU: pairs, and gradients from theirs, are made in one pass over memory each.

Pairs are in memory as (rows, pairs), for a chunk of rows at a time; see `portable`.
"""

import torch
from torch import Tensor

from multilin.ops.block_outer.portable import in_chunks
from multilin.ops.kernels.rows import can_skip_operator

DTYPES = (torch.float32, torch.bfloat16)


def block_outer(left: Tensor, right: Tensor, weight: Tensor) -> Tensor:
    """See `multilin.ops.block_outer`; all of one type."""
    return in_chunks(left, right, weight, expand, contract)


def expand(left_RNK: Tensor, right_RNJ: Tensor) -> Tensor:
    """The products of pairs, (R, N K J)."""
    compute = _expand if can_skip_operator(left_RNK) else _expand_operator
    return compute(left_RNK, right_RNJ).flatten(1)


def contract(dresult_RD: Tensor, weight: Tensor, left_RNK: Tensor, right_RNJ: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of left and right."""
    dpairs = (dresult_RD @ weight.flatten(1)).view(-1, *weight.shape[1:])
    gradients: tuple[Tensor, Tensor] = (_contract if can_skip_operator(left_RNK) else _contract_operator)(
        dpairs, left_RNK, right_RNJ
    )
    return gradients


def _expand(left: Tensor, right: Tensor) -> Tensor:
    from multilin.ops.block_outer.cpu_kernels import expand as kernel
    from multilin.ops.kernels.cpu_launch import launch_parts

    pairs = torch.empty((*left.shape, right.shape[-1]), dtype=left.dtype)
    (rows, blocks, K), J = left.shape, right.shape[-1]
    launch_parts(
        kernel, left.dtype, pairs.numel(), num_rows=rows, num_blocks=blocks, left_width=K, right_width=J,
        left=left.contiguous(), right=right.contiguous(), pairs=pairs,
    )  # fmt: skip
    return pairs


def _contract(dpairs: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    from multilin.ops.block_outer.cpu_kernels import contract as kernel
    from multilin.ops.kernels.cpu_launch import launch_parts

    dleft, dright = torch.empty(left.shape, dtype=left.dtype), torch.empty(right.shape, dtype=right.dtype)
    (rows, blocks, K), J = left.shape, right.shape[-1]
    launch_parts(
        kernel, left.dtype, dpairs.numel(), num_rows=rows, num_blocks=blocks, left_width=K, right_width=J,
        left=left.contiguous(), right=right.contiguous(), pairs=dpairs.contiguous(), dleft=dleft, dright=dright,
    )  # fmt: skip
    return dleft, dright


_expand_operator = torch.library.custom_op("multilin::expand_pairs", _expand, mutates_args=(), device_types="cpu")
_expand_operator.register_fake(lambda left, right: left.new_empty(*left.shape, right.shape[-1]))
_contract_operator = torch.library.custom_op("multilin::contract_pairs", _contract, mutates_args=(), device_types="cpu")
_contract_operator.register_fake(lambda dpairs, left, right: (left.new_empty(left.shape), right.new_empty(right.shape)))
