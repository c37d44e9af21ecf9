"""Block outer products as matrix products over the expanded pairs, for a chunk of rows at a time.

A chunk's pairs stand as (pairs, rows), so that they are products of whole lines of numbers and multiply the weight as
it lies in memory. They stay in the cache until their matrix product, and are made again for the backward pass.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

NUMBERS = {"cpu": 2**21}  # pairs of a chunk: in the cache, and rows enough for full-speed matrix products
MANY_NUMBERS = 2**27  # on devices that want much to do at a time
FEWEST_ROWS = 128


def block_outer(left: Tensor, right: Tensor, weight: Tensor) -> Tensor:
    """See `multilin.ops.block_outer`."""
    batch = left.shape[:-2]
    result: Tensor = _BlockOuter.apply(left.reshape(-1, *left.shape[-2:]), right.reshape(-1, *right.shape[-2:]), weight)
    return result.view(*batch, len(weight))


class _BlockOuter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left_RNK: Tensor, right_RNJ: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(left_RNK, right_RNJ, weight)
        weight_DF = weight.flatten(1)
        result_RD = left_RNK.new_empty(len(left_RNK), len(weight))
        for rows in row_chunks(left_RNK, weight_DF):
            pairs = _pairs(_rows_last(left_RNK[rows]), _rows_last(right_RNJ[rows]))
            result_RD[rows] = (weight_DF @ pairs.flatten(0, 2)).t()
        return result_RD

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *dresults: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        left_RNK, right_RNJ, weight = ctx.saved_tensors
        # Sums over chunks of rows in float32 or better, whatever the dtype of the products.
        wide = torch.promote_types(weight.dtype, torch.float32)
        weight_FD = weight.flatten(1).t().contiguous()
        dweight_FD = torch.zeros_like(weight_FD, dtype=wide)
        dleft_RNK, dright_RNJ = torch.empty_like(left_RNK), torch.empty_like(right_RNJ)
        with torch.autocast(weight.device.type, enabled=False):
            for rows in row_chunks(left_RNK, weight_FD.t()):
                left_NKR, right_NJR = _rows_last(left_RNK[rows]), _rows_last(right_RNJ[rows])
                dresult_RD = dresults[0][rows]
                dweight_FD += _pairs(left_NKR, right_NJR).flatten(0, 2) @ dresult_RD
                dpairs = (weight_FD @ _rows_last(dresult_RD)).view(*weight.shape[1:], -1)
                dleft_RNK[rows] = (dpairs * right_NJR[:, None]).sum(dim=2).movedim(-1, 0)
                dright_RNJ[rows] = (dpairs * left_NKR[:, :, None]).sum(dim=1).movedim(-1, 0)
        dweight = dweight_FD.to(weight.dtype).t().contiguous()
        return dleft_RNK, dright_RNJ, dweight.view_as(weight)


def row_chunks(left_RNK: Tensor, weight_DF: Tensor) -> Iterator[slice]:
    """Rows whose pairs are held at a time."""
    numbers = NUMBERS.get(left_RNK.device.type, MANY_NUMBERS)
    num_rows = max(numbers // max(weight_DF.shape[1], 1), FEWEST_ROWS)
    for first in range(0, len(left_RNK), num_rows):
        yield slice(first, min(first + num_rows, len(left_RNK)))


def _rows_last(x: Tensor) -> Tensor:
    return x.movedim(0, -1).contiguous()


def _pairs(left_NKR: Tensor, right_NJR: Tensor) -> Tensor:
    """(N, K, J, rows)."""
    return left_NKR[:, :, None] * right_NJR[:, None]
