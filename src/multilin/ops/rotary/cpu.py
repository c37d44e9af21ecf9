"""Turning of pairs on a CPU, one pass over memory; its gradient is turning back. The kernel is in `cpu_kernels`."""

from typing import Any

import torch
from torch import Tensor

from multilin.ops.numba_kernels.rows import as_rows, place, runs_directly
from multilin.ops.rotary.cpu_task import Task


def rotary(x_BTHD: Tensor, cos_BTP: Tensor, sin_BTP: Tensor, block: int) -> Tensor:
    """See `multilin.ops.rotary`; x is float32 or bf16."""
    turn = _run if runs_directly(x_BTHD) else _turn
    result: Tensor = turn(x_BTHD, cos_BTP.float(), sin_BTP.float(), block, False)
    return result


@torch.library.custom_op("multilin::rotary", mutates_args=(), device_types="cpu")
def _turn(x: Tensor, cos: Tensor, sin: Tensor, block: int, is_inverse: bool) -> Tensor:
    return _run(x, cos, sin, block, is_inverse)


@_turn.register_fake
def _turn_shape(x: Tensor, cos: Tensor, sin: Tensor, block: int, is_inverse: bool) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cos, sin, ctx.block, ctx.is_inverse = inputs
    ctx.save_for_backward(cos, sin)


def _differentiate(ctx: Any, dresult: Tensor) -> tuple[Any, ...]:
    return _turn(dresult, *ctx.saved_tensors, ctx.block, not ctx.is_inverse), None, None, None, None


_turn.register_autograd(_differentiate, setup_context=_save)


def _run(x: Tensor, cos: Tensor, sin: Tensor, block: int, is_inverse: bool) -> Tensor:
    from multilin.ops.numba_kernels.launch import launch, num_threads
    from multilin.ops.rotary.cpu_kernels import turn

    result = torch.empty(x.shape, dtype=x.dtype)
    if x.numel() == 0:
        return result
    rows, cos, sin = as_rows(x.flatten(2)), cos.contiguous(), sin.contiguous()
    threads = num_threads(x.numel())
    task = Task(
        len(rows), rows.shape[1], x.shape[-1], block, threads, is_inverse, *place(rows),
        cos.data_ptr(), sin.data_ptr(), result.data_ptr(),
    )  # fmt: skip
    launch(turn, task, x.dtype, threads, threads)
    return result
