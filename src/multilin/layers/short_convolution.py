"""A convolution over the last few tokens, separately for each channel."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, pad

from multilin.layers.base import Layout, ParameterHolder
from multilin.ops.kernels import refuse_second_derivative

PIECE = {"cpu": (1, 128)}  # rows and positions of a piece whose products stay in the cache until they are summed
WHOLE = (2**31, 2**31)  # on other devices, which need large pieces of work


class ShortConvolution(ParameterHolder):
    """A causal convolution per channel over K tokens, y_t = sum_{i < K} w_{K-1-i} * x_{t-i}, without bias.

    Inputs before the text, and padding, count as 0; padding between tokens still takes a place among the K tokens.
    Computed in float32 or better. The state is the last K - 1 inputs (B, K - 1, D) up to the last token of each row, 0
    for missing inputs.

    Args:
        width: D.
        kernel_size: K.
    """

    def __init__(self, width: int, kernel_size: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(kernel_size, width))  # the current token's row is the last

    def forward(self, x_BTD: Tensor, state: Tensor | None, layout: Layout) -> tuple[Tensor, Tensor | None]:
        """(B, T, D) to (B, T, D), and the state, or None if the layout needs none."""
        num_time, num_before = x_BTD.shape[1], len(self.weight) - 1
        dtype = torch.promote_types(x_BTD.dtype, torch.float32)
        new_BTD = x_BTD.to(dtype)
        if layout.padding_BT is not None:
            new_BTD = new_BTD.masked_fill(layout.padding_BT[..., None], 0.0)
        if state is None:
            state = new_BTD.new_zeros(x_BTD.shape[0], num_before, x_BTD.shape[2])
        inputs_BSD, weight_KD = torch.cat([state.to(dtype), new_BTD], dim=1), self.weight.to(dtype)
        starts_BT = layout.starts_BT
        text_BS = None if starts_BT is None else pad(starts_BT.cumsum(dim=1), (num_before, 0))
        with torch.autocast(x_BTD.device.type, enabled=False):
            if num_time == 1:
                y_BTD = (inputs_BSD * weight_KD).sum(dim=1, keepdim=True)
            else:
                y_BTD = _Convolution.apply(inputs_BSD, weight_KD)
            if text_BS is not None:
                y_BTD = _restart(y_BTD, inputs_BSD, weight_KD, text_BS)
        y_BTD = y_BTD.to(x_BTD.dtype)
        return y_BTD, _last_inputs(inputs_BSD, text_BS, layout.padding_BT, num_before) if layout.needs_state else None

    def initialize(self, std: float) -> None:
        """Draw the weights uniformly within +-1 / sqrt(K), as PyTorch's convolutions do; `std` is ignored."""
        nn.init.uniform_(self.weight, -(len(self.weight) ** -0.5), len(self.weight) ** -0.5)


class _Convolution(torch.autograd.Function):
    """The convolution of inputs (B, K - 1 + T, D) to (B, T, D), with a faster weight gradient than PyTorch's."""

    @staticmethod
    def forward(ctx: Any, inputs_BSD: Tensor, weight_KD: Tensor) -> Tensor:
        ctx.save_for_backward(inputs_BSD, weight_KD)
        return _convolve(inputs_BSD, weight_KD)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        refuse_second_derivative("short_convolution")
        (inputs_BSD, weight_KD), dy_BTD = ctx.saved_tensors, gradients[0]
        with torch.autocast(dy_BTD.device.type, enabled=False):
            return _gradients(inputs_BSD, weight_KD, dy_BTD)


def _gradients(inputs_BSD: Tensor, weight_KD: Tensor, dy_BTD: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the inputs and the weights. The weight gradient is summed over pieces of `PIECE` positions."""
    num_before = len(weight_KD) - 1
    dinputs_BSD = _convolve(pad(dy_BTD, (0, 0, num_before, num_before)), weight_KD.flip(0))
    dweight_KD = torch.zeros_like(weight_KD)
    num_rows, length = PIECE.get(dy_BTD.device.type, WHOLE)
    for inputs_RSD, dy_RTD in zip(inputs_BSD.split(num_rows), dy_BTD.split(num_rows), strict=True):
        for first in range(0, dy_RTD.shape[1], length):
            piece = dy_RTD[:, first : first + length]
            for tap, total_D in enumerate(dweight_KD):
                total_D += (inputs_RSD[:, first + tap : first + tap + piece.shape[1]] * piece).sum(dim=(0, 1))
    return dinputs_BSD, dweight_KD


def _convolve(inputs_BSD: Tensor, weight_KD: Tensor) -> Tensor:
    convolve = _convolve_channels_last if inputs_BSD.device.type == "cpu" else _add_shifted
    return convolve(inputs_BSD, weight_KD)


def _add_shifted(inputs_BSD: Tensor, weight_KD: Tensor) -> Tensor:
    """The convolution for GPUs: the compiler makes one kernel of these operations, many times faster than cuDNN."""
    num_time = inputs_BSD.shape[1] - len(weight_KD) + 1
    y_BTD = inputs_BSD[:, :num_time] * weight_KD[0]
    for tap, weight_D in enumerate(weight_KD[1:], start=1):
        y_BTD = torch.addcmul(y_BTD, inputs_BSD[:, tap : tap + num_time], weight_D)
    return y_BTD


def _convolve_channels_last(inputs_BSD: Tensor, weight_KD: Tensor) -> Tensor:
    # With channels last in memory, PyTorch's two-dimensional convolution is several times faster.
    kernel_DK = weight_KD.t()[:, None, :, None].contiguous(memory_format=torch.channels_last)
    y_BDT1 = conv2d(inputs_BSD.transpose(1, 2)[..., None], kernel_DK, groups=weight_KD.shape[1])
    return y_BDT1[..., 0].transpose(1, 2)


def _restart(y_BTD: Tensor, inputs_BSD: Tensor, weight_KD: Tensor, text_BS: Tensor) -> Tensor:
    """The sums, computed again for positions whose window crosses the start of a text."""
    text_BTK = text_BS.unfold(1, len(weight_KD), 1)
    is_own_BTK = text_BTK == text_BTK[..., -1:]
    row_N, time_N = (~is_own_BTK.all(dim=-1)).nonzero(as_tuple=True)
    taps_NKD = inputs_BSD[row_N[:, None], time_N[:, None] + torch.arange(len(weight_KD), device=time_N.device)]
    own_NKD = taps_NKD.masked_fill(~is_own_BTK[row_N, time_N][..., None], 0.0)
    return y_BTD.index_put((row_N, time_N), (own_NKD * weight_KD).sum(dim=1))


def _last_inputs(inputs_BSD: Tensor, text_BS: Tensor | None, padding_BT: Tensor | None, num_before: int) -> Tensor:
    """A copy of each row's last inputs up to the row's last token, with 0 for inputs of earlier texts."""
    num_batch, num_all = inputs_BSD.shape[:2]
    index_BS = torch.arange(num_all - num_before, num_all, device=inputs_BSD.device).expand(num_batch, -1)
    if padding_BT is not None:
        number_T = torch.arange(1, num_all - num_before + 1, device=inputs_BSD.device)
        last_B1 = number_T.masked_fill(padding_BT, 0).amax(dim=1, keepdim=True)
        index_BS = last_B1 + torch.arange(num_before, device=inputs_BSD.device)
    last_BSD = inputs_BSD.gather(1, index_BS[..., None].expand(-1, -1, inputs_BSD.shape[2]))
    if text_BS is not None:
        last_BSD = last_BSD.masked_fill((text_BS.gather(1, index_BS) != text_BS[:, -1:])[..., None], 0.0)
    return last_BSD
