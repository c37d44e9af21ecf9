"""Rounded numbers, and gradients rounded in blocks for the way between devices."""

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 128  # numbers that share a scale where gradients travel


class Rounded(NamedTuple):
    """values * scale: int8 in [-127, 127], and floats that broadcast to them."""

    values: Tensor
    scale: Tensor


def quantize_blocks(x: Tensor) -> Rounded:
    """A tensor of any shape as int8 in blocks of 128 with one float32 scale each; the last block is padded with 0.

    Returns values (N, 128) int8 and scale (N, 1) float32: 1.03 bytes per number.
    """
    flat = x.reshape(-1).float()
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    return round_by(padded, padded.abs().amax(dim=-1, keepdim=True) / 127)


def dequantize_blocks(rounded: Rounded, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """The float32 tensor of that shape."""
    flat = (rounded.values * rounded.scale).view(-1)
    return flat[: torch.Size(shape).numel()].view(shape)


def round_by(x: Tensor, scale: Tensor) -> Rounded:
    """x / scale rounded to the nearest integer; where the scale is 0 there are only zeros."""
    divisor = torch.where(scale == 0, 1.0, scale)
    return Rounded((x / divisor).round_().to(torch.int8), scale)
