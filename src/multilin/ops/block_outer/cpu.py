"""Block outer products on a CPU: one pass over memory computes the products of pairs, another pass the gradients.

Products lie in memory as (rows, pairs), a chunk of rows at a time (see `portable`). Right blocks have J = 4, 8 or 16.
"""

import torch
from torch import Tensor

from multilin.ops.block_outer.portable import in_chunks
from multilin.ops.kernels import LazyModule, operator

_LANES = 16  # products that one vector instruction computes
_kernels, _launch = LazyModule("multilin.ops.block_outer.cpu_kernels"), LazyModule("multilin.ops.kernels.cpu_launch")


def refuses_vectors(*factors: Tensor) -> str | None:
    """`Backend.refuses` for a special case, which takes only factors whose products do not fill whole vectors."""
    if len(factors) == 1:
        return "only one factor is given"
    left_width, width = factors[0].shape[-1], factors[1].shape[-1]
    is_whole = width in (4, 8, 16) and left_width % (_LANES // width) == 0
    return "the products fill whole vectors" if is_whole else None


def block_outer(left: Tensor, right: Tensor, weight: Tensor) -> Tensor:
    """See `multilin.ops.block_outer`; all arguments have one dtype."""
    return in_chunks(left, right, weight, expand, contract)


@operator("expand_pairs", lambda left, right: left.new_empty(len(left), left.shape[1] * left.shape[2] * right.shape[2]))
def expand(left_RNK: Tensor, right_RNJ: Tensor) -> Tensor:
    """The products of pairs, (R, N K J)."""
    (rows, blocks, width), other = left_RNK.shape, right_RNJ.shape[-1]
    pairs = torch.empty((rows, blocks * width * other), dtype=left_RNK.dtype)
    _launch.launch_parts(_kernels.expand, pairs.numel(), left_RNK.contiguous(), right_RNJ.contiguous(), pairs)
    return pairs


def contract(dresult_RD: Tensor, weight: Tensor, left_RNK: Tensor, right_RNJ: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of left and right."""
    return contract_pairs(dresult_RD @ weight.flatten(1), left_RNK, right_RNJ)


@operator("contract_pairs", lambda _, left, right: (left.new_empty(left.shape), right.new_empty(right.shape)))
def contract_pairs(dpairs: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of left and right from the gradient of their products (R, N K J)."""
    dleft, dright = torch.empty(left.shape, dtype=left.dtype), torch.empty(right.shape, dtype=right.dtype)
    inputs = dpairs.contiguous().flatten(1), left.contiguous(), right.contiguous()
    _launch.launch_parts(_kernels.contract, dpairs.numel(), *inputs, dleft, dright)
    return dleft, dright
