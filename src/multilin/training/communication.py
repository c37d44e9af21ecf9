"""Gradients that travel between devices as int8, in blocks of 128 with one scale each."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from multilin.errors import InputError
from multilin.ops.int8 import BLOCK, Rounded, dequantize_blocks, quantize_blocks


class Int8Gradients:
    """The mean of gradients over devices, for DistributedDataParallel: `model.register_comm_hook(state, average)`.

    Every device sends each other device its share of the gradient as int8, sums the shares it gets in float32, and
    sends the rounded mean back to all. So each number crosses the wire twice in each direction, as in a ring of
    float32, with 1.03 bytes instead of 4, whatever the number of devices; all devices end with the same bits.

    Attributes:
        bytes_sent: by this device to others so far.
        float32_bytes: what a ring all-reduce of float32 would have sent.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, error_feedback: bool = False) -> None:
        """Set up.

        Args:
            group: the devices; None is all.
            error_feedback: what rounding took from a gradient is added to the next one. It is kept in float32 and
                not in checkpoints, so a resumed run starts without it.
        """
        self.group, self.error_feedback = group, error_feedback
        self.residuals: dict[int, Tensor] = {}
        self.bytes_sent = self.float32_bytes = 0

    def mean(self, gradient: Tensor, index: int = 0) -> Tensor:
        """The mean over all devices of a flat gradient; `index` tells gradients apart for the error feedback."""
        world, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        share = -(-gradient.numel() // (world * BLOCK)) * BLOCK
        padded = torch.nn.functional.pad(gradient.float(), (0, world * share - gradient.numel()))
        if self.error_feedback and index in self.residuals:
            padded += self.residuals[index]
        sent = quantize_blocks(padded)
        received = self._exchange(sent)
        own = dequantize_blocks(received, (world, share)).mean(dim=0)
        rounded = quantize_blocks(own)
        if self.error_feedback:
            residual = padded - dequantize_blocks(sent, padded.shape)
            # The mean is rounded once, here: as part of the sum that would be world times as much.
            residual[rank * share : (rank + 1) * share] += world * (own - dequantize_blocks(rounded, own.shape))
            self.residuals[index] = residual
        whole = dequantize_blocks(self._gather(rounded), padded.shape)
        self.float32_bytes += 2 * (world - 1) * padded[:share].nbytes
        return whole[: gradient.numel()].to(gradient.dtype)

    def _exchange(self, rounded: Rounded) -> Rounded:
        parts = []
        for part in rounded:
            received = torch.empty_like(part)
            dist.all_to_all_single(received, part.contiguous(), group=self.group)
            parts.append(received)
            world = dist.get_world_size(self.group)
            self.bytes_sent += part.nbytes // world * (world - 1)
        return Rounded(*parts)

    def _gather(self, rounded: Rounded) -> Rounded:
        world, parts = dist.get_world_size(self.group), []
        # torch 2.13 renamed it; the old name still works there, with a warning.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        for part in rounded:
            whole = part.new_empty((world * len(part), *part.shape[1:]))
            gather(whole, part.contiguous(), group=self.group)
            parts.append(whole)
            self.bytes_sent += part.nbytes * (world - 1)
        return Rounded(*parts)


def average(state: Int8Gradients, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    """DistributedDataParallel's communication hook."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(state.mean(bucket.buffer(), bucket.index()))
    return future


def compress_gradients(wrapped: Any) -> Any:
    """The model as accelerate wrapped it, its gradients travelling as int8; a model on one device stays as it is.

    Raises:
        InputError: it is distributed in another way than by DistributedDataParallel.
    """
    if isinstance(wrapped, DistributedDataParallel):
        wrapped.register_comm_hook(Int8Gradients(), average)
    elif dist.is_initialized() and dist.get_world_size() > 1:
        raise InputError(
            f"training.communication: 'int8' given, but {type(wrapped).__name__} sends gradients in its own way; only "
            "DistributedDataParallel can send them as int8"
        )
    return wrapped
