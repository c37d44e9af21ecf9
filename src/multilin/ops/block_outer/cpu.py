"""Block outer products on a CPU: pairs, and gradients from theirs, are made in one pass over memory each.

Pairs stand as (rows, pairs) in the order of the weight, for a chunk of rows at a time, as in `expand`.
"""

from typing import Any

import torch
from torch import Tensor

from multilin.ops.block_outer.cpu_task import Task
from multilin.ops.block_outer.expand import row_chunks
from multilin.ops.numba_kernels.rows import runs_directly


def block_outer(left: Tensor, right: Tensor, weight: Tensor) -> Tensor:
    """See `multilin.ops.block_outer`; all in float32, or all in bf16."""
    batch = left.shape[:-2]
    result: Tensor = _BlockOuter.apply(left.reshape(-1, *left.shape[-2:]), right.reshape(-1, *right.shape[-2:]), weight)
    return result.view(*batch, len(weight))


class _BlockOuter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left_RNK: Tensor, right_RNJ: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(left_RNK, right_RNJ, weight)
        weight_FD = weight.flatten(1).t()
        result_RD = left_RNK.new_empty(len(left_RNK), len(weight))
        for rows in row_chunks(left_RNK, weight_FD.t()):
            result_RD[rows] = expand(left_RNK[rows], right_RNJ[rows]).flatten(1) @ weight_FD
        return result_RD

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *dresults: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        left_RNK, right_RNJ, weight = ctx.saved_tensors
        weight_DF = weight.flatten(1)
        # Sums over chunks of rows in float32, whatever the dtype of the products.
        dweight_DF = torch.zeros_like(weight_DF, dtype=torch.float32)
        dleft_RNK, dright_RNJ = torch.empty_like(left_RNK), torch.empty_like(right_RNJ)
        with torch.autocast(weight.device.type, enabled=False):
            for rows in row_chunks(left_RNK, weight_DF):
                left, right, dresult_RD = left_RNK[rows], right_RNJ[rows], dresults[0][rows]
                dweight_DF += dresult_RD.t() @ expand(left, right).flatten(1)
                dpairs = (dresult_RD @ weight_DF).view(-1, *weight.shape[1:])
                dleft_RNK[rows], dright_RNJ[rows] = contract(dpairs, left, right)
        return dleft_RNK, dright_RNJ, dweight_DF.to(weight.dtype).view_as(weight)


def expand(left_RNK: Tensor, right_RNJ: Tensor) -> Tensor:
    """Products (R, N, K, J) of float32 or bf16 numbers; without gradient."""
    return (_run_expand if runs_directly(left_RNK) else _expand)(left_RNK, right_RNJ)


def contract(dpairs_RNKJ: Tensor, left_RNK: Tensor, right_RNJ: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of left and right from that of their products."""
    return (_run_contract if runs_directly(left_RNK) else _contract)(dpairs_RNKJ, left_RNK, right_RNJ)


@torch.library.custom_op("multilin::expand_pairs", mutates_args=(), device_types="cpu")
def _expand(left: Tensor, right: Tensor) -> Tensor:
    return _run_expand(left, right)


@_expand.register_fake
def _expand_shape(left: Tensor, right: Tensor) -> Tensor:
    return left.new_empty(*left.shape, right.shape[-1])


@torch.library.custom_op("multilin::contract_pairs", mutates_args=(), device_types="cpu")
def _contract(dpairs: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    return _run_contract(dpairs, left, right)


@_contract.register_fake
def _contract_shapes(dpairs: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    return left.new_empty(left.shape), right.new_empty(right.shape)


def _run_expand(left: Tensor, right: Tensor) -> Tensor:
    from multilin.ops.block_outer.cpu_kernels import expand as kernel
    from multilin.ops.numba_kernels.launch import launch, num_threads

    left, right = left.contiguous(), right.contiguous()
    pairs = torch.empty((*left.shape, right.shape[-1]), dtype=left.dtype)
    if pairs.numel():
        threads = num_threads(pairs.numel())
        task = Task(*left.shape, right.shape[-1], threads, left.data_ptr(), right.data_ptr(), pairs.data_ptr())
        launch(kernel, task, left.dtype, threads, threads)
    return pairs


def _run_contract(dpairs: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    from multilin.ops.block_outer.cpu_kernels import contract as kernel
    from multilin.ops.numba_kernels.launch import launch, num_threads

    dpairs, left, right = dpairs.contiguous(), left.contiguous(), right.contiguous()
    dleft, dright = torch.empty(left.shape, dtype=left.dtype), torch.empty(right.shape, dtype=right.dtype)
    if dpairs.numel():
        threads = num_threads(dpairs.numel())
        task = Task(
            *left.shape, right.shape[-1], threads, left.data_ptr(), right.data_ptr(), dpairs.data_ptr(),
            dleft.data_ptr(), dright.data_ptr(),
        )  # fmt: skip
        launch(kernel, task, left.dtype, threads, threads)
    return dleft, dright
