"""Averages gradients over devices in int8; each block of 128 numbers has one scale."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from multilin.ops.int8 import BLOCK, Rounded, dequantize_blocks, quantize_blocks


def mean_in_int8(gradient: Tensor) -> Tensor:
    """The mean of a flat gradient over all devices; the result is the same, bit for bit, on all devices.

    Each device averages one share of the gradient. It receives this share from all devices as int8, averages in
    float32, and sends the mean, rounded to int8, to all. As in a ring all-reduce, each number is sent and received
    twice, but a number takes 1.03 bytes instead of 4. This holds for any number of devices.
    """
    world = dist.get_world_size()
    share = -(-gradient.numel() // (world * BLOCK)) * BLOCK
    padded = torch.nn.functional.pad(gradient.float(), (0, world * share - gradient.numel()))
    received = Rounded(*map(_exchange, quantize_blocks(padded)))
    mean = quantize_blocks(dequantize_blocks(received, (world, share)).mean(dim=0))
    whole = dequantize_blocks(Rounded(*map(_gather, mean)), padded.shape)
    return whole[: gradient.numel()].to(gradient.dtype)


def _exchange(part: Tensor) -> Tensor:
    received = torch.empty_like(part)
    dist.all_to_all_single(received, part.contiguous())
    return received


def _gather(part: Tensor) -> Tensor:
    whole = part.new_empty((dist.get_world_size() * len(part), *part.shape[1:]))
    # torch 2.13 renamed this function; the old name still works there, with a warning.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(whole, part.contiguous())
    return whole


def average(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    """Average a bucket of gradients in int8; a hook for DDP: `model.register_comm_hook(None, average)`."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(mean_in_int8(bucket.buffer()))
    return future


def compress_gradients(model: DistributedDataParallel) -> None:
    """Make a model exchange its gradients as int8."""
    model.register_comm_hook(None, average)
