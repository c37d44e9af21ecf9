"""Block outer products on a GPU: pairs live in registers only, forward and backward.

Forward, a program makes the pairs of a tile of rows and of a chunk of blocks, and multiplies them with a tile of the
weight. Where rows are few, as while decoding, the chunks are split over programs whose sums are added in a fixed order.
Backward, the gradient of the pairs is a tile of registers too, contracted with either factor where it was made; the
weight's gradient makes the pairs again. The kernels are in `gpu_kernels`, their launches in
`gpu_launch`.
"""

from typing import Any

import torch
from torch import Tensor

from multilin.ops.block_outer.gpu_launch import contract, gradient_of_weight, gradients_of_factors
from multilin.ops.numba_kernels.rows import runs_directly

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def block_outer(left: Tensor, right: Tensor, weight: Tensor) -> Tensor:
    """See `multilin.ops.block_outer`; all three of one type."""
    lefts, rights = (x.reshape(-1, *x.shape[-2:]) for x in (left, right))
    compute = contract if runs_directly(left, right, weight) else _forward
    result: Tensor = compute(lefts, rights, weight)
    return result.view(*left.shape[:-2], len(weight))


@torch.library.custom_op("multilin::block_outer_gpu", mutates_args=())
def _forward(left: Tensor, right: Tensor, weight: Tensor) -> Tensor:
    return contract(left, right, weight)


@_forward.register_fake
def _result_shape(left: Tensor, right: Tensor, weight: Tensor) -> Tensor:
    return left.new_empty(left.shape[0], weight.shape[0])


@torch.library.custom_op("multilin::block_outer_gpu_backward", mutates_args=())
def _backward(dresult: Tensor, left: Tensor, right: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    factors = gradients_of_factors(dresult, left, right, weight)
    return *factors, gradient_of_weight(dresult, left, right, dtype=weight.dtype, shape=weight.shape)


@_backward.register_fake
def _gradient_shapes(dresult: Tensor, left: Tensor, right: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return left.new_empty(left.shape), right.new_empty(right.shape), weight.new_empty(weight.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, dresult: Tensor) -> tuple[Tensor, ...]:
    gradients: tuple[Tensor, ...] = _backward(dresult, *ctx.saved_tensors)
    return gradients


_forward.register_autograd(_differentiate, setup_context=_save)
