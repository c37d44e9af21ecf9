"""Turning of pairs on a CPU, one pass over memory; its gradient is turning back. The kernel is in `cpu_kernels`."""

from typing import Any

import torch
from torch import Tensor

from multilin.ops.kernels import LazyModule, operator

_kernels, _launch = LazyModule("multilin.ops.rotary.cpu_kernels"), LazyModule("multilin.ops.kernels.cpu_launch")


def rotary(x_BTHD: Tensor, cos_BTP: Tensor, sin_BTP: Tensor, block: int) -> Tensor:
    """See `multilin.ops.rotary`."""
    return _turn(x_BTHD, cos_BTP.float(), sin_BTP.float(), block, False)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cos, sin, ctx.block, ctx.is_inverse = inputs
    ctx.save_for_backward(cos, sin)


def _differentiate(ctx: Any, dresult: Tensor) -> tuple[Any, ...]:
    return _turn(dresult, *ctx.saved_tensors, ctx.block, not ctx.is_inverse), None, None, None, None


@operator("rotary", lambda x, *_: torch.empty(x.shape, dtype=x.dtype, device=x.device), _save, _differentiate)
def _turn(x: Tensor, cos: Tensor, sin: Tensor, block: int, is_inverse: bool) -> Tensor:
    result, inputs = torch.empty(x.shape, dtype=x.dtype), (x.contiguous(), cos.contiguous(), sin.contiguous())
    _launch.launch_parts(_kernels.turn, x.numel(), *inputs, block, is_inverse, result)
    return result
