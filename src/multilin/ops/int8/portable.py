"""The steps of int8 products in PyTorch, for every device and dtype."""

import torch
from torch import Tensor

from multilin.ops.int8.rounded import Rounded, round_by

LONGEST_SUM = 2**17  # 2^17 * 127^2 < 2^31
_CUDA_MULTIPLE, _CUDA_ROWS = 8, 17  # what torch._int_mm takes there


def round_whole(x: Tensor) -> Rounded:
    """One scale."""
    wide = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    return round_by(wide, wide.abs().amax() / 127 if wide.numel() else wide.new_zeros(()))


def round_rows(x: Tensor) -> Rounded:
    """One scale per row."""
    wide = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    return round_by(wide, wide.abs().amax(dim=-1, keepdim=True) / 127)


def round_randomly(wide: Tensor, scale: Tensor, seed: Tensor) -> Rounded:
    """Up or down with the probability that makes the mean right."""
    generator = torch.Generator(wide.device).manual_seed(int(seed))
    noise = torch.rand(wide.shape, generator=generator, dtype=wide.dtype, device=wide.device)
    divisor = torch.where(scale == 0, 1.0, scale)
    return Rounded((wide / divisor + noise).floor_().clamp_(-127, 127).to(torch.int8), scale)


def draw_seed() -> Tensor:
    """From torch's default generator, so that a seeded run draws the same numbers again."""
    return torch.randint(2**31 - 1, ())


def multiply(left: Tensor, right: Tensor) -> Tensor:
    """(m, n) int8 times (n, p) int8, exact in int32."""
    if left.device.type != "cuda":
        return torch._int_mm(left, right)
    (m, n), p = left.shape, right.shape[1]
    rows = max(_CUDA_ROWS - m, 0)
    inner, columns = -n % _CUDA_MULTIPLE, -p % _CUDA_MULTIPLE
    left = torch.nn.functional.pad(left, (0, inner, 0, rows)).contiguous()
    right = torch.nn.functional.pad(right, (0, columns, 0, inner))
    # cuBLASLt's int8 product wants the right factor by columns.
    return torch._int_mm(left, right.t().contiguous().t())[:m, :p]


class PortableSteps:
    """What surrounds the integer products; `KernelSteps` does the same with fewer passes over memory.

    Rows are 2-D: (R, width). Pairs are laid out (R, K, J, N).
    """

    round_rows = staticmethod(round_rows)

    @staticmethod
    def round_rows_randomly(x: Tensor) -> Rounded:
        """One scale per row, rounded without bias."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return round_randomly(wide, wide.abs().amax(dim=-1, keepdim=True) / 127, draw_seed())

    @staticmethod
    def round_columns_randomly(x: Tensor, row_scale: Tensor) -> Rounded:
        """row_scale * x with one scale (1, width) per column, rounded without bias."""
        wide = x.to(row_scale.dtype) * row_scale
        return round_randomly(wide, wide.abs().amax(dim=0, keepdim=True) / 127, draw_seed())

    @staticmethod
    def scale_rows(
        product: Tensor, row_scale: Tensor, factor: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """product * row_scale * factor + bias."""
        result = product * (row_scale * factor)
        return (result if bias is None else result + bias).to(dtype)

    @staticmethod
    def round_pairs(left: Tensor, right: Tensor) -> Rounded:
        """left (R, N, K) and right (R, N, J) to their products (R, K J N), one scale per row."""
        return round_rows(_pairs(left, right).flatten(1))

    @staticmethod
    def contract_pairs(
        product: Tensor, row_scale: Tensor, factor: Tensor, left: Tensor, right: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Gradients of left and right from that of the pairs, product * row_scale * factor."""
        (_, blocks, width), other = left.shape, right.shape[-1]
        dpairs = (product * (row_scale * factor)).view(-1, width, other, blocks)
        dleft = (dpairs * right.mT[:, None]).sum(dim=2).mT
        dright = (dpairs * left.mT[:, :, None]).sum(dim=1).mT
        return dleft.to(left.dtype), dright.to(right.dtype)


def _pairs(left: Tensor, right: Tensor) -> Tensor:
    return left.mT[:, :, None] * right.mT[:, None]
