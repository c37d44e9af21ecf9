"""Weights rounded to int8, or to fewer values of it to see what stronger rounding would cost."""

from typing import Any

import torch
from torch import Tensor

from multilin.errors import InputError
from multilin.ops.int8.portable import round_whole
from multilin.ops.int8.rounded import Rounded

STEPS_PER_RMS = 32  # the source's weights have variance 1 and steps of 1/32
LEVELS = {"sim_4bit": 16, "sim_2bit": 4, "ternary": 3}
"""How many values; they divide the range of +-48 steps evenly, so four of them are +-12 and +-36, parted at +-24."""
_RANGE = 48


def round_weight(weight: Tensor, levels: str = "int8") -> Rounded:
    """A weight as int8 with one scale: max / 127; for fewer levels a step of rms / 32, the same unit as the source's.

    Raises:
        InputError: unknown levels.
    """
    weight = weight.detach()
    if levels == "int8":
        return round_whole(weight)
    if levels not in LEVELS:
        raise InputError(f"levels: {levels!r} given, but it must be int8, {', '.join(LEVELS)}")
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    step = wide.square().mean().sqrt() / STEPS_PER_RMS
    steps = wide / torch.where(step == 0, 1.0, step)
    return Rounded(_nearest_level(steps, LEVELS[levels]), step)


def _nearest_level(steps: Tensor, count: int) -> Tensor:
    """The middle of the cell that a number lies in; cells beyond the range belong to the last one."""
    cell = 2 * _RANGE // count
    if count % 2:
        index = (steps / cell).round().clamp(-(count // 2), count // 2)
        return (index * cell).to(torch.int8)
    index = (steps / cell).floor().clamp(-(count // 2), count // 2 - 1)
    return (index * cell + cell // 2).to(torch.int8)


def simulate_rounding(weight: Tensor, levels: str) -> Tensor:
    """The weight as if it were stored in a few levels; the gradient is straight-through.

        sim_2bit: +-12, +-36 steps, parted at +-24        sim_4bit: +-3, +-9, ... +-45        ternary: 0, +-32

    A step is 1/32 of the weight's root mean square: 1/32 in the source, whose weights have variance 1. A weight of
    zeros stays zero.

    Args:
        weight: any shape.
        levels: "sim_2bit", "sim_4bit" or "ternary".

    Returns:
        Same shape and dtype.

    Source: TScale (sim_2bit); the others by the same mechanism.
    """
    result: Tensor = _StraightThrough.apply(weight, levels)
    return result


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, levels: str) -> Tensor:
        rounded = round_weight(weight, levels)
        return (rounded.values * rounded.scale).to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, *dresults: Tensor) -> tuple[Tensor, None]:
        return dresults[0], None
