"""Calls that start every kernel for GPUs, each with all that it can be given."""

import itertools

import torch

from multilin.ops.delta_rule import portable as delta_rule
from multilin.ops.int8.gpu import GpuSteps
from multilin.ops.kernels import gpu_launch as launch
from multilin.ops.linear_recurrence import operator as linear_recurrence
from multilin.ops.prefix_softmax import PrefixSoftmaxState
from multilin.ops.prefix_softmax import operator as prefix_softmax
from multilin.ops.windowed_attention import WindowedAttentionState
from multilin.ops.windowed_attention import gpu as windowed_attention


def call_int8() -> None:
    """Rounding, and both products with their gradients in int8."""
    x, values, factor = torch.zeros(64, 128), torch.zeros(96, 128, dtype=torch.int8), torch.ones(())
    rounded = GpuSteps.round_rows(x)
    GpuSteps.scaled_product(rounded, values.t(), factor, torch.zeros(96), torch.bfloat16)
    left, weight = torch.zeros(64, 16, 4, dtype=torch.bfloat16), torch.zeros(96, 16, 4, 4, dtype=torch.int8)
    GpuSteps.outer(left, left, weight, factor, torch.bfloat16)
    dresult = torch.zeros(64, 96, dtype=torch.bfloat16)
    GpuSteps.gradient_of_weight(dresult, rounded, "int8", torch.bfloat16)
    GpuSteps.gradients_of_factors(dresult, left, left, weight, factor, "int8")
    GpuSteps.gradient_of_pairs_weight(dresult, left, left, 1.0, "int8", torch.bfloat16)


def call_windowed_attention(dtype: torch.dtype, width: int, value_width: int) -> None:
    """A text with everything, one with nothing, and a token after a state."""
    options = {"window": 64, "scale": 0.1, "hyper": 1.0, "null_key": True}
    inputs = [torch.zeros(1, 200, 2, n, dtype=dtype, requires_grad=True) for n in (width, width, value_width)]
    starts = torch.zeros(1, 200, dtype=torch.bool)
    slope = torch.zeros((), requires_grad=True)
    means, _ = windowed_attention.windowed_attention(*inputs, slope=slope, starts=starts, **options)
    means.float().sum().backward()
    windowed_attention.windowed_attention(*inputs, window=9)[0].float().sum().backward()
    state = WindowedAttentionState(torch.zeros(1, 64, 2, width), torch.zeros(1, 64, 2, value_width), torch.zeros(1, 64))
    with torch.no_grad():
        new = [x[:, :1] for x in inputs]
        windowed_attention.windowed_attention(*new, state=state, starts=starts[:, :1], **options)


def call_linear_recurrence(length: int, is_packed: bool) -> None:
    """Forward and backward, in parts of time where it is long."""
    inputs = torch.zeros(1, length, 2, 96, dtype=torch.bfloat16, requires_grad=True)
    before = torch.zeros(1, 96, requires_grad=True)
    starts = torch.zeros(1, length, dtype=torch.bool) if is_packed else None
    hidden, after = linear_recurrence.linear_recurrence("gpu", inputs, before, starts)
    (hidden.float().sum() + after.sum()).backward()


def call_delta_rule(width: int, value_width: int) -> None:
    """Forward and backward, over several chunks."""
    x, v = torch.zeros(1, 200, 2, width, requires_grad=True), torch.zeros(1, 200, 2, value_width)
    rates, memory = torch.zeros(1, 200, 2), torch.zeros(1, 2, width, value_width)
    read, after = delta_rule.delta_rule(x, x, v, rates, rates, memory, kernels="gpu")
    (read.sum() + after.sum()).backward()


def call_prefix_softmax(length: int, window: int | None, dtype: torch.dtype, has_own: bool, is_packed: bool) -> None:
    """Forward and, but for one position, backward."""
    is_step = length == 1
    past = 1 if window is None else window - 1
    logits, own = (torch.zeros(1, length, 2, requires_grad=not is_step) for _ in range(2))
    values = torch.zeros(1, length, 2, 128, dtype=dtype, requires_grad=not is_step)
    state = (torch.zeros(1, past, 2), torch.zeros(1, past, 2, 128))
    state = PrefixSoftmaxState(*(x.requires_grad_(not is_step and window is None) for x in state))
    starts = torch.zeros(1, length, dtype=torch.bool) if is_packed else None
    more = {"own_logits": own} if has_own else {"null_logit": 0.3}
    means, after = prefix_softmax.prefix_softmax(
        "gpu", logits, values, window=window, state=state, starts=starts, **more
    )
    if not is_step:
        (means.float().sum() + after.values_BSHD.sum()).backward()


def call_every_kernel() -> None:
    """On a card of many processors, so that sums and time are cut."""
    launch.num_processors = lambda device: 132
    for window, has_own in ((None, False), (None, True), (100, False), (256, False)):
        for length, is_packed in itertools.product((600, 1), (False, True)):
            call_prefix_softmax(length, window, torch.bfloat16, has_own, is_packed)
    call_windowed_attention(torch.bfloat16, 128, 128)
    call_windowed_attention(torch.float32, 128, 256)  # of the widest heads
    call_int8()
    call_linear_recurrence(600, True)
    call_linear_recurrence(1, False)
    call_delta_rule(128, 128)
    call_delta_rule(128, 512)
    torch.set_float32_matmul_precision("high")
    call_delta_rule(128, 128)
