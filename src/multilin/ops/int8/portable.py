"""The steps of int8 products in PyTorch, for every device and dtype."""

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from multilin.ops.block_outer import portable as block_outer
from multilin.ops.int8.rounding import Rounded, quantize, row_scale

LONGEST_SUM = 2**17  # 2^17 * 127^2 < 2^31
_CUDA_MULTIPLE, _CUDA_ROWS = 8, 17  # of torch._int_mm on a GPU: sizes are multiples of 8, rows at least 17


def draw_seed() -> Tensor:
    """A seed from torch's default generator, so that a seeded run draws the same numbers again."""
    return torch.randint(2**31 - 1, ())


def multiply(left: Tensor, right: Tensor) -> Tensor:
    """Multiply (m, n) int8 by (n, p) int8, exactly in int32."""
    if left.device.type != "cuda":
        return torch._int_mm(left, right)
    (m, n), p = left.shape, right.shape[1]
    rows, inner, columns = max(_CUDA_ROWS - m, 0), -n % _CUDA_MULTIPLE, -p % _CUDA_MULTIPLE
    left, right = pad(left, (0, inner, 0, rows)).contiguous(), pad(right, (0, columns, 0, inner))
    # cuBLASLt's int8 product needs the right factor in column-major order.
    return torch._int_mm(left, right.t().contiguous().t())[:m, :p]


class PortableSteps:
    """The steps around int8 products: rounding before, and scaling after.

    `CpuSteps` and `GpuSteps` do the same with fewer passes over memory. Rows are 2-D: (R, width).
    """

    block_outer: Any = block_outer  # how the products of float pairs are made and contracted

    @staticmethod
    def round_rows(x: Tensor, seed: Tensor | None = None) -> Rounded:
        """Round rows with one scale per row; with a seed, round stochastically without bias."""
        if seed is None:
            return quantize(x)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = row_scale(wide)
        generator = torch.Generator(x.device).manual_seed(int(seed))
        noise = torch.rand(wide.shape, generator=generator, dtype=wide.dtype, device=x.device)
        divisor = torch.where(scale == 0, 1.0, scale)
        return Rounded((wide / divisor + noise).floor_().clamp_(-127, 127).to(torch.int8), scale)

    @classmethod
    def round_columns_randomly(cls, x: Tensor, row_scale: Tensor) -> Rounded:
        """Round row_scale * x without bias: the transpose (width, R), and one scale (width, 1) per column of x."""
        return cls.round_rows((x.to(row_scale.dtype) * row_scale).t(), draw_seed())

    @staticmethod
    def scale_rows(
        product: Tensor, row_scale: Tensor, factor: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """product * row_scale * factor + bias."""
        result = product * (row_scale * factor)
        return (result if bias is None else result + bias).to(dtype)

    @classmethod
    def round_pairs(cls, left: Tensor, right: Tensor) -> Rounded:
        """Round the products (R, N K J) of left (R, N, K) and right (R, N, J), with one scale per row."""
        wide = torch.promote_types(left.dtype, torch.float32)
        return quantize(block_outer.expand(left.to(wide), right.to(wide)))

    @classmethod
    def contract_pairs(
        cls, product: Tensor, row_scale: Tensor, factor: Tensor, left: Tensor, right: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Gradients of left and right; the gradient of their products is product * row_scale * factor."""
        dleft, dright = block_outer.contract_pairs((product * (row_scale * factor)).t(), left, right)
        return dleft.to(left.dtype), dright.to(right.dtype)

    @classmethod
    def scaled_product(
        cls, left: Rounded, right: Tensor, factor: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """left @ right * factor + bias."""
        return cls.scale_rows(multiply(left.values, right), left.scale, factor, bias, dtype)

    @classmethod
    def outer(cls, left: Tensor, right: Tensor, values: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
        """Contract rounded pairs with an int8 weight (D, N, K, J)."""

        def contract(rows: slice) -> Tensor:
            pairs = cls.round_pairs(left[rows], right[rows])
            return cls.scaled_product(pairs, values.flatten(1).t(), factor, None, dtype)

        return _joined(map(contract, _rows_of_pairs(left, right)))

    @classmethod
    def gradients_of_factors(
        cls, dresult: Tensor, left: Tensor, right: Tensor, values: Tensor, factor: Tensor, backward: str
    ) -> tuple[Tensor, Tensor]:
        """Gradients of left and right."""
        rounded = cls.round_rows(dresult, draw_seed()) if backward == "int8" else None

        def contract(rows: slice) -> tuple[Tensor, Tensor]:
            if rounded is None:
                weight, wide = values.to(dresult.dtype), torch.promote_types(dresult.dtype, torch.float32)
                dleft, dright = cls.block_outer.contract(dresult[rows], weight, left[rows], right[rows])
                return (dleft.to(wide) * factor).to(left.dtype), (dright.to(wide) * factor).to(right.dtype)
            product = multiply(rounded.values[rows], values.flatten(1))
            return cls.contract_pairs(product, rounded.scale[rows], factor, left[rows], right[rows])

        dleft, dright = zip(*map(contract, _rows_of_pairs(left, right)), strict=True)
        return _joined(dleft), _joined(dright)

    @classmethod
    def gradient_of_pairs_weight(
        cls, dresult: Tensor, left: Tensor, right: Tensor, factor: float, backward: str, dtype: torch.dtype
    ) -> Tensor:
        """Gradient of the weight (D, N, K, J); the products of pairs are rounded again for it."""
        wide = torch.promote_types(dtype, torch.float32)

        def gradient(rows: slice) -> Tensor:
            values, scale = cls.round_pairs(left[rows], right[rows])
            return cls.gradient_of_weight(dresult[rows], Rounded(values, scale * factor), backward, wide)

        dflat = functools.reduce(torch.add, map(gradient, _rows_of_pairs(left, right)))
        return dflat.to(dtype).view(-1, *left.shape[1:], right.shape[-1])

    @classmethod
    def gradient_of_rows(
        cls, dresult: Tensor, values: Tensor, factor: Tensor, backward: str, dtype: torch.dtype
    ) -> Tensor:
        """dy W."""
        if backward != "int8":
            return ((dresult @ values.to(dresult.dtype)) * factor).to(dtype)
        return cls.scaled_product(cls.round_rows(dresult, draw_seed()), values, factor, None, dtype)

    @classmethod
    def gradient_of_weight(cls, dresult: Tensor, rows: Rounded, backward: str, dtype: torch.dtype) -> Tensor:
        """dy^T x, x = values * scale."""
        values, row_scale = rows
        if backward != "int8":
            return (dresult.t() @ (values * row_scale).to(dresult.dtype)).to(dtype)
        one = torch.ones((), dtype=row_scale.dtype, device=row_scale.device)

        def gradient(part: slice) -> Tensor:
            columns = cls.round_columns_randomly(dresult[part], row_scale[part])
            return cls.scaled_product(columns, values[part], one, None, row_scale.dtype)

        parts = block_outer.row_chunks(dresult.shape[0], 1, LONGEST_SUM)  # whose sums fit into int32
        return functools.reduce(torch.add, map(gradient, parts)).to(dtype)


def num_pairs(left: Tensor, right: Tensor) -> int:
    """The number of products in each row of left (R, N, K) and right (R, N, J)."""
    return left.shape[1] * left.shape[2] * right.shape[2]


def _rows_of_pairs(left: Tensor, right: Tensor) -> list[slice]:
    return block_outer.row_chunks(left.shape[0], num_pairs(left, right), block_outer.MANY_NUMBERS)


def _joined(parts: Iterable[Tensor]) -> Tensor:
    first, *others = parts
    return torch.cat([first, *others]) if others else first
