"""Losses and their gradient from a chunk of logits on a CPU, in one pass over memory; see `cpu_kernels`."""

import torch
from torch import Tensor

from multilin.ops.kernels import LazyModule
from multilin.ops.linear_cross_entropy.portable import IGNORED

_kernels = LazyModule("multilin.ops.linear_cross_entropy.cpu_kernels")
_launch = LazyModule("multilin.ops.kernels.cpu_launch")


def losses_and_gradient(
    logits_NV: Tensor, bias_V: Tensor | None, targets_N: Tensor, label_smoothing: float, makes_gradient: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """See `portable.losses_and_gradient`; the gradient overwrites the logits."""
    num_rows, width = logits_NV.shape
    logits_NV, targets_N = logits_NV.contiguous(), targets_N.contiguous()
    threads = _launch.num_threads(logits_NV.numel())
    losses_N = torch.empty(num_rows, dtype=torch.float32)
    has_dbias = makes_gradient and bias_V is not None and bias_V.requires_grad
    dbias = torch.zeros(threads, width if has_dbias else 0, dtype=torch.float32)
    bias = None if bias_V is None else bias_V.detach().float().contiguous()
    _launch.launch_parts(
        _kernels.forward, logits_NV.numel(), logits_NV, bias, targets_N, IGNORED, makes_gradient, losses_N,
        torch.empty(threads, width, dtype=torch.float32), dbias, float(label_smoothing),
    )  # fmt: skip
    return losses_N, logits_NV, dbias.sum(dim=0) if dbias.numel() else None
