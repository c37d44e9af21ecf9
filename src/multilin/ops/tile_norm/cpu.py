"""Division by the root mean square on a CPU, one pass over memory each way; the kernels are in `cpu_kernels`."""

from typing import Any

import torch
from torch import Tensor

from multilin.ops.numba_kernels.rows import as_rows, place, runs_directly
from multilin.ops.tile_norm.cpu_task import Task


def tile_norm(x: Tensor, tile: int, dtype: torch.dtype) -> Tensor:
    """See `multilin.ops.tile_norm`; both dtypes are float32 or bf16."""
    if runs_directly(x):
        return _run_forward(x, tile, dtype, keeps=False)[0]
    result: Tensor = _forward(x, tile, dtype)[0]
    return result


@torch.library.custom_op("multilin::tile_norm", mutates_args=(), device_types="cpu")
def _forward(x: Tensor, tile: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return _run_forward(x, tile, dtype, keeps=True)


@_forward.register_fake
def _forward_shapes(x: Tensor, tile: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scales = x.new_empty((*x.shape[:-1], x.shape[-1] // tile), dtype=torch.float32)
    return x.new_empty(x.shape, dtype=dtype), scales


@torch.library.custom_op("multilin::tile_norm_backward", mutates_args=(), device_types="cpu")
def _backward(dresult: Tensor, x: Tensor, scales: Tensor) -> Tensor:
    return _run_backward(dresult, x, scales)


@_backward.register_fake
def _backward_shapes(dresult: Tensor, x: Tensor, scales: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], output[1])
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, dresult: Tensor, dscales: Tensor | None) -> tuple[Tensor, None, None]:
    return _backward(dresult, *ctx.saved_tensors), None, None


_forward.register_autograd(_differentiate, setup_context=_save)


def _run_forward(x: Tensor, tile: int, dtype: torch.dtype, *, keeps: bool) -> tuple[Tensor, Tensor]:
    """The result, and 1 / root mean square of each tile in float32 (of no size if not kept)."""
    from multilin.ops.numba_kernels.launch import launch, num_threads
    from multilin.ops.tile_norm.cpu_kernels import forward

    result = torch.empty(x.shape, dtype=dtype)
    scales = torch.empty((*x.shape[:-1], x.shape[-1] // tile) if keeps else 0)
    if x.numel() == 0:
        return result, scales
    rows, results = as_rows(x), as_rows(result)
    threads = num_threads(x.numel())
    task = Task(len(rows), rows.shape[1], tile, threads, *place(rows), *place(results))
    task.scales = scales.data_ptr() if keeps else 0
    launch(forward, task, x.dtype, threads, threads, result_dtype=dtype)
    return result, scales


def _run_backward(dresult: Tensor, x: Tensor, scales: Tensor) -> Tensor:
    from multilin.ops.numba_kernels.launch import launch, num_threads
    from multilin.ops.tile_norm.cpu_kernels import backward

    dx = torch.empty(x.shape, dtype=x.dtype)
    if dx.numel() == 0:
        return dx
    rows, dresults, scales = as_rows(x), as_rows(dresult), scales.contiguous()
    threads = num_threads(x.numel())
    tile = x.shape[-1] // scales.shape[-1]
    task = Task(
        len(rows), rows.shape[1], tile, threads, *place(rows), *place(dresults), scales.data_ptr(), dx.data_ptr()
    )
    launch(backward, task, x.dtype, threads, threads, result_dtype=dresult.dtype)
    return dx
