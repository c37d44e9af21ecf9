"""Calls that start every kernel of prefix_softmax, each with all that it can be given."""

import itertools

import torch

from multilin.ops.kernels import gpu_launch as launch
from multilin.ops.prefix_softmax import PrefixSoftmaxState, operator

T, H = 600, 2


def call(length: int, window: int | None, dtype: torch.dtype, has_own: bool, is_packed: bool) -> None:
    """Forward and, but for one position, backward."""
    is_step = length == 1
    past = 1 if window is None else window - 1
    logits, own = (torch.zeros(1, length, H, requires_grad=not is_step) for _ in range(2))
    values = torch.zeros(1, length, H, 128, dtype=dtype, requires_grad=not is_step)
    state = (torch.zeros(1, past, H), torch.zeros(1, past, H, 128))
    state = PrefixSoftmaxState(*(x.requires_grad_(not is_step and window is None) for x in state))
    starts = torch.zeros(1, length, dtype=torch.bool) if is_packed else None
    more = {"own_logits": own} if has_own else {"null_logit": 0.3}
    means, after = operator.prefix_softmax("gpu", logits, values, window=window, state=state, starts=starts, **more)
    if not is_step:
        (means.float().sum() + after.values_BSHD.sum()).backward()


def call_every_kernel() -> None:
    """On a card of many processors, so that time is cut."""
    launch.num_processors = lambda device: 132
    for window, has_own in ((None, False), (None, True), (100, False), (256, False)):
        for length, is_packed in itertools.product((T, 1), (False, True)):
            call(length, window, torch.bfloat16, has_own, is_packed)
