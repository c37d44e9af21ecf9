"""Block outer products: for a chunk of rows, compute the products of all pairs, then multiply them by the matrix.

A chunk's products stay in the cache until this multiplication, and are computed again for the backward pass. Products
lie in memory as (pairs, rows), so that each row of products is the product of two rows of factors.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from multilin.ops.kernels import is_exported, refuse_second_derivative

NUMBERS = {"cpu": 2**21}  # products of a chunk: they fit the cache, and are enough for a fast matrix product
MANY_NUMBERS = 2**27  # on other devices, which need large pieces of work
FEWEST_ROWS = 128


def block_outer(left: Tensor, right: Tensor, weight: Tensor) -> Tensor:
    """See `multilin.ops.block_outer`."""
    # All rows at once, by one product with the matrix. Compiled for a GPU, this is faster than chunks of rows,
    # but the memory of the products grows with the number of rows.
    if is_exported() or (torch.compiler.is_compiling() and left.is_cuda):
        return torch.nn.functional.linear((left[..., None] * right[..., None, :]).flatten(-3), weight.flatten(1))
    return in_chunks(left, right, weight, expand, contract)


def expand(left_RNK: Tensor, right_RNJ: Tensor) -> Tensor:
    """The products of pairs, (R, N K J)."""
    return (_rows_last(left_RNK)[:, :, None] * _rows_last(right_RNJ)[:, None]).flatten(0, 2).t()


def contract(dresult_RD: Tensor, weight: Tensor, left_RNK: Tensor, right_RNJ: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of left and right."""
    return contract_pairs(weight.flatten(1).t() @ dresult_RD.t(), left_RNK, right_RNJ)


def contract_pairs(dpairs_FR: Tensor, left_RNK: Tensor, right_RNJ: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of left and right, in float32 or better, from the gradient of their products (N K J, R)."""
    wide = torch.promote_types(dpairs_FR.dtype, torch.float32)
    dpairs_NKJR = dpairs_FR.unflatten(0, (*left_RNK.shape[1:], right_RNJ.shape[-1]))
    dleft_NKR = (dpairs_NKJR * _rows_last(right_RNJ)[:, None]).sum(dim=2, dtype=wide)
    dright_NJR = (dpairs_NKJR * _rows_last(left_RNK)[:, :, None]).sum(dim=1, dtype=wide)
    return dleft_NKR.movedim(-1, 0), dright_NJR.movedim(-1, 0)


def _rows_last(x: Tensor) -> Tensor:
    return x.movedim(0, -1).contiguous()


def in_chunks(left: Tensor, right: Tensor, weight: Tensor, expand: Callable, contract: Callable) -> Tensor:
    """Block outer products in chunks of rows, by functions like `expand` and `contract` above."""
    lefts, rights = (x.reshape(-1, *x.shape[-2:]) for x in (left, right))
    result: Tensor = _BlockOuter.apply(lefts, rights, weight, expand, contract)
    return result.view(*left.shape[:-2], len(weight))


class _BlockOuter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, left_RNK: Tensor, right_RNJ: Tensor, weight: Tensor, expand: Callable, contract: Callable
    ) -> Tensor:
        ctx.save_for_backward(left_RNK, right_RNJ, weight)
        ctx.steps = expand, contract
        weight_FD = weight.flatten(1).t()
        result_RD = left_RNK.new_empty(left_RNK.shape[0], len(weight))
        for rows in row_chunks(left_RNK.shape[0], len(weight_FD), _most_pairs(left_RNK)):
            result_RD[rows] = expand(left_RNK[rows], right_RNJ[rows]) @ weight_FD
        return result_RD

    @staticmethod
    def backward(ctx: Any, *dresults: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("block_outer")
        left_RNK, right_RNJ, weight = ctx.saved_tensors
        expand, contract = ctx.steps
        # Sums over chunks of rows in float32 or better, whatever the dtype of the products.
        wide = torch.promote_types(weight.dtype, torch.float32)
        dweight_DF = torch.zeros_like(weight.flatten(1), dtype=wide)
        dleft_RNK, dright_RNJ = torch.empty_like(left_RNK), torch.empty_like(right_RNJ)
        with torch.autocast(weight.device.type, enabled=False):
            for rows in row_chunks(left_RNK.shape[0], dweight_DF.shape[1], _most_pairs(left_RNK)):
                left, right, dresult_RD = left_RNK[rows], right_RNJ[rows], dresults[0][rows]
                dweight_DF += dresult_RD.t() @ expand(left, right)
                dleft_RNK[rows], dright_RNJ[rows] = contract(dresult_RD, weight, left, right)
        return dleft_RNK, dright_RNJ, dweight_DF.to(weight.dtype).view_as(weight), None, None


def _most_pairs(left: Tensor) -> int:
    return NUMBERS.get(left.device.type, MANY_NUMBERS)


def row_chunks(num_rows: int, num_pairs: int, most_pairs: int) -> list[slice]:
    """Slices of rows to compute one by one; one slice if all rows fit, or in exported graphs, which take any number."""
    size = max(most_pairs // max(num_pairs, 1), FEWEST_ROWS)
    if is_exported() or num_rows <= size:
        return [slice(None)]
    return [slice(first, first + size) for first in range(0, num_rows, size)]
