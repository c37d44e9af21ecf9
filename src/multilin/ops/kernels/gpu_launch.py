"""Start GPU kernels. triton is imported here, not earlier."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton

from multilin.ops.kernels import is_interpreted
from multilin.ops.kernels.gpu_tiles import FLOAT32_PRODUCTS


def autotuned(configs: Sequence[tuple[dict[str, int], int, int]], key: Sequence[str]) -> Callable[[Any], Any]:
    """A decorator above @triton.jit that finds the fastest way to compile a kernel by measuring, once per kind of call.

    Choices are kept on disk between processes. During the measurement the kernel runs again on its own output, and must
    then give the same result. The interpreter takes the first config and measures nothing.

    Args:
        configs: the ways to compile: constants, warps and pipeline stages. The first should be the likely fastest.
        key: names of the arguments whose values distinguish kinds of calls; dtypes of tensors always do.
    """
    if is_interpreted():
        configs = configs[:1]
    ways = [triton.Config(constants, num_warps=warps, num_stages=stages) for constants, warps, stages in configs]
    return triton.autotune(ways, key=list(key), cache_results=True)


@functools.cache
def num_processors(device: torch.device) -> int:
    """The number of streaming multiprocessors of the device; 2 for kernels that are interpreted on a CPU."""
    if device.type != "cuda":
        return 2
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def float32_products() -> str:
    """The precision of float32 products in kernels: float32, or tf32 where PyTorch's settings allow it."""
    is_allowed = torch.version.hip is None and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if is_allowed else FLOAT32_PRODUCTS.value


def block_of(size: int, at_most: int) -> int:
    """The smallest power of two that holds `size`: at least 16, which tensor cores need, and at most `at_most`."""
    return min(max(16, 1 << (size - 1).bit_length()), at_most)
