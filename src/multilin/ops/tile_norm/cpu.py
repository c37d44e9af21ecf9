"""The tile norm on a CPU: one pass over memory forward, one backward. The kernels are in `cpu_kernels`."""

from typing import Any

import torch
from torch import Tensor

from multilin.ops.kernels import LazyModule, operator

_kernels, _launch = LazyModule("multilin.ops.tile_norm.cpu_kernels"), LazyModule("multilin.ops.kernels.cpu_launch")


def tile_norm(x: Tensor, tile: int, dtype: torch.dtype) -> Tensor:
    """See `multilin.ops.tile_norm`."""
    return _forward(x, tile, dtype)[0]


def _fake_forward(x: Tensor, tile: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.empty(x.shape, dtype=dtype, device=x.device), x.new_empty(x.numel() // tile, dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, ctx.tile, _ = inputs
    ctx.save_for_backward(x, output[1])
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, dy: Tensor, _: Tensor | None) -> tuple[Tensor, None, None]:
    return _backward(dy, *ctx.saved_tensors, ctx.tile), None, None


@operator("tile_norm", _fake_forward, _save, _differentiate)
def _forward(x: Tensor, tile: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The result, and 1 / root mean square of each tile in float32."""
    y, scales = _fake_forward(x, tile, dtype)
    _launch.launch_parts(_kernels.forward, x.numel(), x.contiguous(), y, scales)
    return y, scales


@operator("tile_norm_backward", lambda dy, x, *_: torch.empty(x.shape, dtype=x.dtype, device=x.device))
def _backward(dy: Tensor, x: Tensor, scales: Tensor, tile: int) -> Tensor:
    dx = torch.empty(x.shape, dtype=x.dtype)
    _launch.launch_parts(_kernels.backward, x.numel(), dy.contiguous(), x.contiguous(), scales, dx)
    return dx
