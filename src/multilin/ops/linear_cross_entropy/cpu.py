"""Losses and their gradient from a chunk of logits on a CPU, in one pass over memory; see `cpu_kernels`."""

import torch
from torch import Tensor

from multilin.errors import InputError
from multilin.ops.linear_cross_entropy.cpu_task import Task


def losses_and_gradient(
    logits_NV: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    *,
    logit_scale: float,
    label_smoothing: float,
    ignore_index: int,
    makes_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """See `portable.losses_and_gradient`; logits in float32 or bf16, whose place the gradient takes."""
    from multilin.ops.kernels.cpu_launch import launch, num_threads
    from multilin.ops.linear_cross_entropy.cpu_kernels import forward

    num_rows, width = logits_NV.shape
    logits_NV, targets_N = logits_NV.contiguous(), targets_N.contiguous()
    losses_N = torch.empty(num_rows)
    if num_rows == 0:
        return losses_N, logits_NV, None if bias_V is None else torch.zeros(width)
    counted = targets_N[targets_N != ignore_index]
    if counted.numel() and not 0 <= int(counted.min()) <= int(counted.max()) < width:
        wrong = counted.min() if counted.min() < 0 else counted.max()
        raise InputError(f"targets: {int(wrong)} given, but there are {width} tokens, from 0")
    threads = num_threads(logits_NV.numel())
    scores = torch.empty(threads, width)
    dbias = torch.zeros(threads, width) if bias_V is not None and makes_gradient else None
    bias_V = None if bias_V is None else bias_V.detach().float().contiguous()
    task = Task(
        num_rows, width, threads, logits_NV.data_ptr(), 0 if bias_V is None else bias_V.data_ptr(),
        targets_N.data_ptr(), ignore_index, makes_gradient, losses_N.data_ptr(), scores.data_ptr(),
        0 if dbias is None else dbias.data_ptr(), logit_scale, label_smoothing,
    )  # fmt: skip
    launch(forward, task, logits_NV.dtype, threads, threads)
    return losses_N, logits_NV, None if dbias is None else dbias.sum(dim=0)
