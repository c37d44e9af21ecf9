"""The steps of int8 products on a CPU, each one pass over memory; numba is imported at the first call only."""

import functools
from typing import Any

import torch
from torch import Tensor

from multilin.ops.int8.portable import PortableSteps, draw_seed
from multilin.ops.int8.rounded import Rounded
from multilin.ops.kernels import is_forked, why_no_numba

_NARROWEST_BLOCKS = 8  # fewer blocks than SIMD lanes: the loop over them is too short


def why_no_kernels() -> str | None:
    """The reason against them."""
    if is_forked():
        return "a forked process cannot start the threads of the kernels"
    return why_no_numba()


@functools.cache
def _kernels() -> Any:
    from multilin.ops.int8 import cpu

    return cpu


def _bits(x: Tensor) -> tuple[Any, int]:
    """The bits of float32 or bf16 numbers as an array, and how far left they are to be shifted to be float32."""
    x = x.contiguous()
    if x.dtype == torch.float32:
        return x.view(torch.int32).numpy(), 0
    return x.view(torch.int16).numpy(), 16


class KernelSteps(PortableSteps):
    """As `PortableSteps`, for float32 and bf16."""

    dtypes = (torch.float32, torch.bfloat16)
    is_traceable = False

    @staticmethod
    def round_rows(x: Tensor, seed: int = -1) -> Rounded:
        """One scale per row."""
        values, scale = torch.empty(x.shape, dtype=torch.int8), torch.empty(len(x), 1)
        bits, shift = _bits(x.detach())
        _run("round_rows", shift, bits, seed, values.numpy(), scale.numpy())
        return Rounded(values, scale)

    @staticmethod
    def round_rows_randomly(x: Tensor) -> Rounded:
        """One scale per row, rounded without bias."""
        return KernelSteps.round_rows(x, int(draw_seed()))

    @staticmethod
    def round_columns_randomly(x: Tensor, row_scale: Tensor) -> Rounded:
        """row_scale * x with one scale (1, width) per column, rounded without bias."""
        values, scale = torch.empty(x.shape, dtype=torch.int8), torch.empty(1, x.shape[1])
        bits, shift = _bits(x)
        rows = row_scale.float().contiguous().view(-1).numpy()
        _run("round_columns", shift, bits, rows, int(draw_seed()), values.numpy(), scale.numpy()[0])
        return Rounded(values, scale)

    @staticmethod
    def scale_rows(
        product: Tensor, row_scale: Tensor, factor: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """product * row_scale * factor + bias."""
        if dtype not in KernelSteps.dtypes:
            return PortableSteps.scale_rows(product, row_scale, factor, bias, dtype)
        result = torch.empty(product.shape, dtype=dtype)
        bits, shift = _bits(result)
        scales = (row_scale * factor).float().contiguous().view(-1)
        offsets = torch.empty(0) if bias is None else bias.detach().float().contiguous()
        _run("scale_rows", shift, product.contiguous().numpy(), scales.numpy(), offsets.numpy(), bits)
        return result

    @staticmethod
    def round_pairs(left: Tensor, right: Tensor) -> Rounded:
        """left (R, N, K) and right (R, N, J) to their products (R, K J N), one scale per row."""
        rows, blocks, width = left.shape
        if blocks < _NARROWEST_BLOCKS:
            pairs = (left.mT[:, :, None] * right.mT[:, None]).flatten(1)
            return KernelSteps.round_rows(pairs)
        values = torch.empty((rows, width, right.shape[-1], blocks), dtype=torch.int8)
        scale = torch.empty(rows, 1)
        (left_bits, shift), (right_bits, _) = _bits(left.detach()), _bits(right.detach())
        _run("round_pairs", shift, left_bits, right_bits, values.numpy(), scale.numpy())
        return Rounded(values.flatten(1), scale)

    @staticmethod
    def contract_pairs(
        product: Tensor, row_scale: Tensor, factor: Tensor, left: Tensor, right: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Gradients of left and right from that of the pairs, product * row_scale * factor."""
        rows, blocks, width = left.shape
        if blocks < _NARROWEST_BLOCKS:
            return PortableSteps.contract_pairs(product, row_scale, factor, left, right)
        other = right.shape[-1]
        dleft, dright = torch.empty((rows, width, blocks)), torch.empty((rows, other, blocks))
        (left_bits, shift), (right_bits, _) = _bits(left), _bits(right)
        scales = (row_scale * factor).float().contiguous().view(-1).numpy()
        _run("contract_pairs", shift, product.view(rows, width, other, blocks).numpy(), scales, left_bits, right_bits,
            dleft.numpy(), dright.numpy(),
        )  # fmt: skip
        return dleft.mT.to(left.dtype), dright.mT.to(right.dtype)


def _run(kernel: str, shift: int, *arguments: Any) -> None:
    """Call a kernel on as many threads as PyTorch uses."""
    import numba

    threads = torch.get_num_threads()
    numba.set_num_threads(min(threads, int(vars(numba.config)["NUMBA_NUM_THREADS"])))
    _kernels().compiled(kernel, shift)(shift, *arguments)
    if torch.get_num_threads() != threads:
        # Starting numba's threads resets the number of PyTorch's: they share OpenMP.
        torch.set_num_threads(threads)
