"""Division by the root mean square on a CPU, one pass over memory each way; the kernels are in `cpu_kernels`."""

from typing import Any

import torch
from torch import Tensor

from multilin.ops.kernels.rows import as_rows, can_skip_operator, row_bytes

DTYPES = (torch.float32, torch.bfloat16)


def tile_norm(x: Tensor, tile: int, dtype: torch.dtype) -> Tensor:
    """See `multilin.ops.tile_norm`."""
    if can_skip_operator(x):
        return _forward(x, tile, dtype, keeps_scales=False)[0]
    result: Tensor = _operator(x, tile, dtype)[0]
    return result


def _forward(x: Tensor, tile: int, dtype: torch.dtype, keeps_scales: bool = True) -> tuple[Tensor, Tensor]:
    """The result, and 1 / root mean square of each tile in float32 (empty if not kept)."""
    from multilin.ops.kernels.cpu_launch import launch_parts
    from multilin.ops.tile_norm.cpu_kernels import forward

    result = torch.empty(x.shape, dtype=dtype)
    scales = torch.empty((*x.shape[:-1], x.shape[-1] // tile) if keeps_scales else 0)
    rows, results = as_rows(x), as_rows(result)
    launch_parts(
        forward, x.dtype, x.numel(), result_dtype=dtype, num_rows=len(rows), width=rows.shape[1], tile=tile, x=rows,
        x_row=row_bytes(rows), result=results, scales=scales if keeps_scales else None,
    )  # fmt: skip
    return result, scales


def _backward(dresult: Tensor, x: Tensor, scales: Tensor) -> Tensor:
    from multilin.ops.kernels.cpu_launch import launch_parts
    from multilin.ops.tile_norm.cpu_kernels import backward

    dx = torch.empty(x.shape, dtype=x.dtype)
    rows, dresults = as_rows(x), as_rows(dresult)
    launch_parts(
        backward, x.dtype, x.numel(), result_dtype=dresult.dtype, num_rows=len(rows), width=rows.shape[1],
        tile=x.shape[-1] // max(scales.shape[-1], 1), x=rows, x_row=row_bytes(rows), dresult=dresults,
        dresult_row=row_bytes(dresults), scales=scales.contiguous(), dx=dx,
    )  # fmt: skip
    return dx


def _fake_forward(x: Tensor, tile: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scales = x.new_empty((*x.shape[:-1], x.shape[-1] // tile), dtype=torch.float32)
    return x.new_empty(x.shape, dtype=dtype), scales


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], output[1])
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, dresult: Tensor, _: Tensor | None) -> tuple[Tensor, None, None]:
    return _backward_operator(dresult, *ctx.saved_tensors), None, None


_operator = torch.library.custom_op(
    "multilin::tile_norm", _forward, mutates_args=(), device_types="cpu",
    schema="(Tensor x, int tile, ScalarType dtype) -> (Tensor, Tensor)",
)  # fmt: skip
_operator.register_fake(_fake_forward)
_operator.register_autograd(_differentiate, setup_context=_save)
_backward_operator = torch.library.custom_op(
    "multilin::tile_norm_backward", _backward, mutates_args=(), device_types="cpu"
)
_backward_operator.register_fake(lambda dresult, x, scales: torch.empty(x.shape, dtype=x.dtype, device=x.device))
