"""What a layer costs as texts get longer: arithmetic, time and memory of a training step, time of a generated token."""

import math
import statistics
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from multilin.errors import duration
from multilin.testing.laws import Finding, Subject

LENGTHS = (128, 256, 512, 1024, 2048, 4096)
QUADRATIC_SHARE = 0.2  # of the work at the longest text
MOST_BYTES = 5e8  # alive at once, after which no longer text is tried


def cost(subject: Subject, seconds: float = 5.0) -> Finding:
    """Whether the work grows linearly or quadratically with the text, with times beside attention of the same width.

    The word follows from counted work: operations of products, and numbers read and written. Where the last two
    doublings take more than 3.4 times as long, it is quadratic too, for kernels whose work cannot be counted. After
    about so many seconds, longer texts are left out.
    """
    attention = Subject(_Attention(subject.width, 3 * subject.width), width=subject.width)
    steps, others, forward, backward = list[float](), list[float](), list[float](), list[Meter]()
    end = time.perf_counter() + seconds
    lengths = [length for length in LENGTHS if subject.longest is None or length <= subject.longest]
    if len(lengths) < 3:
        return Finding("cost", "says", f"The layer reads at most {subject.longest} tokens, too few to see growth.")
    for length in lengths:
        is_late = len(steps) >= 3 and time.perf_counter() + 20 * (steps[-1] + others[-1]) > end
        if is_late or (len(steps) >= 3 and backward[-1].peak > MOST_BYTES):
            break
        x = subject.draw(1, length)
        with Meter() as meter, torch.no_grad():
            subject.read(x)
        forward.append(meter.work)
        with Meter() as meter:
            _step(subject, x)
        backward.append(meter)
        steps.append(_median(_step, subject, x))
        others.append(_median(_step, attention, x))
    last, far = lengths[len(steps) - 1], lengths[-1] - 8
    spans = (64, far if backward[-1].peak * (far / last) ** 2 < 4 * MOST_BYTES else last - 8)
    measured = {"time": steps, "memory": [meter.peak for meter in backward], "attention": others}
    numbers = {name: math.log2(sizes[-1] / sizes[-3]) / 2 for name, sizes in measured.items()}
    numbers["quadratic share"] = _quadratic_share(forward)
    word = "linear"
    if numbers["quadratic share"] > QUADRATIC_SHARE or min(steps[-1] / steps[-2], steps[-2] / steps[-3]) > 3.4:
        word = "quadratic"
    elif _quadratic_share([meter.work for meter in backward]) > QUADRATIC_SHARE:
        word = "linear, but backward quadratic (a loop over x[:, t] writes whole gradients; use x.unbind(1)),"
    with torch.no_grad():
        states = [subject.read(subject.draw(1, span))[1] for span in spans]
        tokens = [duration(_median(subject.read, subject.draw(1, 1), state)) for state in states]
    return Finding("cost", "says", (
        f"The work is {word} in the text's length: a step takes {duration(steps[0])} at {lengths[0]} tokens and "
        f"{duration(steps[-1])} at {last:,} (T^{numbers['time']:.1f}; attention {duration(others[-1])}, "
        f"T^{numbers['attention']:.1f}), and memory grows as T^{numbers['memory']:.1f}. A generated token takes "
        f"{tokens[0]} after {spans[0]} tokens, {tokens[1]} after {spans[1]:,}."
    ), numbers)  # fmt: skip


def _step(subject: Subject, x: Tensor) -> None:
    loss = subject.read(x.requires_grad_())[0].sum()
    if loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]
    x.grad = None
    subject.module.zero_grad()


def _median(task: Callable[..., Any], *arguments: Any) -> float:
    """The median time of up to seven calls after a first one; of long tasks there are fewer."""
    times = list[float]()
    while len(times) < 8 and (len(times) < 2 or sum(times) < 0.5):
        begin = time.perf_counter()
        task(*arguments)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def _quadratic_share(works: list[float]) -> float:
    """The share of c T^2 in a + b T + c T^2 through the works at the last three lengths, T / 4, T / 2 and T."""
    return (works[-1] - 3 * works[-2] + 2 * works[-3]) * 8 / 3 / works[-1]


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts work and the most bytes alive at once, and notes the lowest precision that float64 is rounded to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lowest = torch.float64
        self.work, self.live, self.peak, self.known = 0.0, 0.0, 0.0, weakref.WeakSet[Any]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket in flop_registry:
            self.work += flop_registry[function.overloadpacket](*args, **(kwargs or {}), out_val=result)
        elif "scaled_dot_product" in function.name() and "backward" not in function.name():
            self.work += 4 * args[0].numel() * args[1].shape[-2]
        for part in result if isinstance(result, tuple | list) else (result,):
            if isinstance(part, Tensor) and (storage := part.untyped_storage()) not in self.known:
                given = [each for each in args if isinstance(each, Tensor)]
                self.work += part.numel() + sum(each.numel() for each in given)
                if any(each.dtype in (torch.float64, torch.complex128) for each in given):
                    kinds = [self.lowest, *([part.dtype] if part.is_floating_point() or part.is_complex() else [])]
                    self.lowest = max(kinds, key=lambda dtype: torch.finfo(dtype).eps)
                self.known.add(storage)
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._free, storage.nbytes())
        return result

    def _free(self, size: int) -> None:
        self.live -= size


class _Attention(nn.Linear):
    """Causal attention with one head, as a yardstick."""

    def forward(self, x_BTD: Tensor, state: Any, layout: Any) -> tuple[Tensor, None]:  # type: ignore[override]
        queries, keys, values = (part[:, None] for part in super().forward(x_BTD).chunk(3, dim=-1))
        return scaled_dot_product_attention(queries, keys, values, is_causal=True)[:, 0], None
