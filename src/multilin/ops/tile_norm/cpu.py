"""Division by the root mean square on a CPU, one pass over memory each way; the kernels are in `cpu_kernels`."""

from typing import Any

import torch
from torch import Tensor

from multilin.ops.kernels import LazyModule
from multilin.ops.kernels.operators import operator
from multilin.ops.kernels.rows import as_rows, row_bytes

DTYPES = (torch.float32, torch.bfloat16)
_kernels, _launch = LazyModule("multilin.ops.tile_norm.cpu_kernels"), LazyModule("multilin.ops.kernels.cpu_launch")


def tile_norm(x: Tensor, tile: int, dtype: torch.dtype) -> Tensor:
    """See `multilin.ops.tile_norm`."""
    result: Tensor = _forward(x, tile, dtype)[0]
    return result


def _fake_forward(x: Tensor, tile: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.empty(x.shape, dtype=dtype, device=x.device), x.new_empty(x.numel() // tile, dtype=torch.float32)


@operator("tile_norm", _fake_forward)
def _forward(x: Tensor, tile: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The result, and 1 / root mean square of each tile in float32."""
    size, rows = x.numel(), as_rows(x)
    result, scales = torch.empty(x.shape, dtype=dtype), torch.empty(size // tile, dtype=torch.float32)
    num_rows, width = rows.shape
    _launch.launch_parts(
        _kernels.forward, x.dtype, size, result_dtype=dtype, num_rows=num_rows, width=width, tile=tile, x=rows,
        x_row=row_bytes(rows), result=result, scales=scales,
    )  # fmt: skip
    return result, scales


@operator("tile_norm_backward", lambda dresult, x, *_: torch.empty(x.shape, dtype=x.dtype, device=x.device))
def _backward(dresult: Tensor, x: Tensor, scales: Tensor, tile: int) -> Tensor:
    dx, rows, dresults = torch.empty(x.shape, dtype=x.dtype), as_rows(x), as_rows(dresult)
    num_rows, width = rows.shape
    _launch.launch_parts(
        _kernels.backward, x.dtype, x.numel(), result_dtype=dresult.dtype, num_rows=num_rows, width=width, tile=tile,
        x=rows, x_row=row_bytes(rows), dresult=dresults, dresult_row=row_bytes(dresults), scales=scales, dx=dx,
    )  # fmt: skip
    return dx


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, ctx.tile, _ = inputs
    ctx.save_for_backward(x, output[1])
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, dresult: Tensor, _: Tensor | None) -> tuple[Tensor, None, None]:
    return _backward(dresult, *ctx.saved_tensors, ctx.tile), None, None


_forward.differentiable(_differentiate, _save)
