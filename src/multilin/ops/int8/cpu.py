"""The steps of int8 products on a CPU: each step is one pass over memory; the kernels are in `cpu_kernels`."""

import torch
from torch import Tensor

from multilin.ops.block_outer import cpu as block_outer
from multilin.ops.int8.portable import PortableSteps, draw_seed, num_pairs
from multilin.ops.int8.rounding import Rounded
from multilin.ops.kernels import LazyModule

_kernels, _launch = LazyModule("multilin.ops.int8.cpu_kernels"), LazyModule("multilin.ops.kernels.cpu_launch")

_COLUMNS = 128  # numbers in one piece of work


def _float32(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32)


class CpuSteps(PortableSteps):
    """The steps of `PortableSteps` for float32 and bf16, outside of graphs."""

    block_outer = block_outer

    @staticmethod
    def round_rows(x: Tensor, seed: Tensor | None = None) -> Rounded:
        """Round rows with one scale per row; with a seed, round stochastically without bias."""
        values, scale = torch.empty(x.shape, dtype=torch.int8), _float32(len(x), 1)
        number = -1 if seed is None else int(seed)
        _launch.launch_parts(_kernels.round_rows, x.numel(), x.contiguous(), number, values, scale)
        return Rounded(values, scale)

    @staticmethod
    def round_columns_randomly(x: Tensor, row_scale: Tensor) -> Rounded:
        """Round row_scale * x without bias: the transpose (width, R), and one scale (width, 1) per column of x."""
        values, scale = torch.empty(x.shape, dtype=torch.int8), _float32(x.shape[1], 1)
        inputs = x.contiguous(), row_scale.float().contiguous(), int(draw_seed())
        num_parts = -(-x.shape[1] // _COLUMNS)
        _launch.launch_parts(_kernels.round_columns, x.numel(), *inputs, values, scale, num_parts=num_parts)
        return Rounded(values.t(), scale)

    @staticmethod
    def scale_rows(
        product: Tensor, row_scale: Tensor, factor: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """product * row_scale * factor + bias."""
        result, scales = torch.empty(product.shape, dtype=dtype), (row_scale * factor).float().contiguous()
        bias = None if bias is None else bias.detach().float().contiguous()
        _launch.launch_parts(_kernels.scale_rows, product.numel(), product.contiguous(), scales, bias, result)
        return result

    @classmethod
    def round_pairs(cls, left: Tensor, right: Tensor) -> Rounded:
        """Round the products (R, N K J) of left (R, N, K) and right (R, N, J), with one scale per row."""
        values = torch.empty((len(left), num_pairs(left, right)), dtype=torch.int8)
        scale = _float32(len(left), 1)
        factors = (x.float().contiguous() for x in (left, right))
        _launch.launch_parts(_kernels.round_pairs, values.numel(), *factors, values, scale)
        return Rounded(values, scale)

    @classmethod
    def contract_pairs(
        cls, product: Tensor, row_scale: Tensor, factor: Tensor, left: Tensor, right: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Gradients of left and right; the gradient of their products is product * row_scale * factor."""
        dleft, dright = _float32(*left.shape), _float32(*right.shape)
        inputs = (x.float().contiguous() for x in (row_scale * factor, left, right))
        _launch.launch_parts(_kernels.contract_pairs, product.numel(), product.contiguous(), *inputs, dleft, dright)
        return dleft.to(left.dtype), dright.to(right.dtype)
