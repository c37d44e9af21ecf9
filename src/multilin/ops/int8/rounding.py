"""Rounding of tensors, rows and blocks to int8 with a scale, and of weights to fewer levels."""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from multilin.errors import InputError

BLOCK = 128  # numbers that share a scale when gradients are sent
STEPS_PER_RMS = 32  # the source's weights have variance 1 and steps of 1/32
LEVELS = {"sim_4bit": 16, "sim_2bit": 4, "ternary": 3}
"""How many values; they divide the range of +-48 steps evenly, so four of them are +-12 and +-36, parted at +-24."""
_RANGE = 48


class Rounded(NamedTuple):
    """The numbers values * scale: int8 values in [-127, 127], and float scales that broadcast to them."""

    values: Tensor
    scale: Tensor


def quantize(x: Float[Tensor, "*shape"], *, per: Literal["matrix", "row"] = "row") -> Rounded:
    """Symmetric rounding to int8.

        values = round(x / scale)        scale = max |x| / 127, over the whole tensor or over each row (last axis)

    So |x - scale * values| <= scale / 2, zero stays zero, the largest number becomes +-127, and rounding again changes
    nothing. Ties go to the even number. Nan and inf in x make the scale nan or inf.

    Args:
        x: any shape, a float dtype.
        per: which numbers share a scale. Scales are float32 or better, of shape () or (..., 1).
    """
    wide = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    if per == "row":
        return _round_by(wide, row_scale(wide))
    return _round_by(wide, wide.abs().amax() / 127 if wide.numel() else wide.new_zeros(()))


def dequantize(rounded: Rounded) -> Float[Tensor, "*shape"]:
    """scale * values, in the dtype of the scale."""
    return rounded.values.to(rounded.scale.dtype) * rounded.scale


def quantize_blocks(x: Tensor) -> Rounded:
    """A tensor of any shape as int8 blocks (N, 128) with float32 scales (N, 1); the last block is padded with 0."""
    flat = x.reshape(-1).float()
    return quantize(torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK))


def dequantize_blocks(rounded: Rounded, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """The float32 tensor of this shape from the blocks."""
    return dequantize(rounded).view(-1)[: torch.Size(shape).numel()].view(shape)


def row_scale(x: Tensor) -> Tensor:
    """For each row, the largest |x| / 127, (..., 1); 0 for rows without numbers."""
    return x.abs().amax(dim=-1, keepdim=True) / 127 if x.shape[-1] else x.new_zeros(*x.shape[:-1], 1)


def _round_by(x: Tensor, scale: Tensor) -> Rounded:
    """x / scale rounded to the nearest integer; where the scale is 0, x and the result are 0."""
    divisor = torch.where(scale == 0, 1.0, scale)
    return Rounded((x / divisor).round_().to(torch.int8), scale)


def round_weight(weight: Tensor, levels: str = "int8") -> Rounded:
    """A weight as int8 with one scale: max |w| / 127, or for fewer levels TScale's step, rms / 32.

    Raises:
        InputError: unknown levels.
    """
    if levels == "int8":
        return quantize(weight, per="matrix")
    if levels not in LEVELS:
        raise InputError(f"levels: {levels!r} given, but it must be int8, {', '.join(LEVELS)}")
    wide = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
    step = wide.square().mean().sqrt() / STEPS_PER_RMS
    steps = wide / torch.where(step == 0, 1.0, step)
    return Rounded(_nearest_level(steps, LEVELS[levels]), step)


def _nearest_level(steps: Tensor, count: int) -> Tensor:
    """The middle of the cell in which a number lies; numbers beyond the range belong to the last cell."""
    cell = 2 * _RANGE // count
    if count % 2:
        index = (steps / cell).round().clamp(-(count // 2), count // 2)
        return (index * cell).to(torch.int8)
    index = (steps / cell).floor().clamp(-(count // 2), count // 2 - 1)
    return (index * cell + cell // 2).to(torch.int8)


def simulate_rounding(weight: Tensor, levels: str) -> Tensor:
    """The weight as if it were stored in a few levels; the gradient is straight-through.

        sim_2bit: +-12, +-36 steps, split at +-24        sim_4bit: +-3, +-9, ... +-45        ternary: 0, +-32

    A step is 1/32 of the weight's root mean square; in TScale a step is 1/32, because weights there have variance 1. A
    weight of zeros stays zero. The result has the weight's shape and dtype.

    Source: TScale (sim_2bit). The other levels follow the same rule.
    """
    # The second term is 0, but carries the gradient.
    return dequantize(round_weight(weight, levels)).to(weight.dtype) + (weight - weight.detach())
