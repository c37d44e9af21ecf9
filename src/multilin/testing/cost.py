"""What a layer costs as texts get longer: arithmetic, time and memory of a training step, time of a generated token."""

import math
import statistics
import time
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from multilin.errors import duration
from multilin.testing.laws import Finding
from multilin.testing.subject import LayerSubject, Subject

LENGTHS = (128, 256, 512, 1024)
QUADRATIC_SHARE = 0.2  # of the work at the longest text


def cost(subject: LayerSubject, longest: int = 4096, seconds: float = 6.0) -> Finding:
    """Whether a step is linear in the text's length, with time and memory beside attention of the same width.

    The word follows from counted work (operations and numbers written); if two doublings take more than three times as
    long each, it is quadratic too, for kernels whose work cannot be counted.

    Args:
        subject: layers in float32.
        longest: tokens before the last generated token that is timed.
        seconds: after about this time, longer texts are left out.
    """
    lengths = [length for length in LENGTHS if subject.longest is None or length <= subject.longest]
    attention = LayerSubject(_Attention(subject.width), width=subject.width)
    begin, times, meters, other = time.perf_counter(), list[float](), list[_Meter](), list[float]()
    for length in lengths:
        if len(times) > 1 and time.perf_counter() - begin + 12 * times[-1] > seconds:
            break
        times.append(_step_time(subject, length))
        other.append(_step_time(attention, length))
        with _Meter() as meter:
            _step(subject, subject.draw(1, length))
        meters.append(meter)
    shortest, length = lengths[0], lengths[len(times) - 1]
    numbers = {
        "time": _exponent(times), "memory": _exponent([meter.peak for meter in meters]), "attention": _exponent(other)
    }  # fmt: skip
    doublings = [math.log2(after / before) for before, after in zip(times[-3:], times[-2:], strict=False)]
    share = _quadratic_share([meter.work for meter in meters])
    numbers["quadratic share"] = share
    word = "quadratic" if share > QUADRATIC_SHARE or min([*doublings, numbers["time"]]) > 1.6 else "linear"
    spans = [64, longest if subject.longest is None else length // 2]
    tokens = [_token_time(subject, span) for span in spans]
    return Finding("cost", "says", (
        f"The work is {word} in the text's length: a step takes {duration(times[0])} at {shortest} tokens and "
        f"{duration(times[-1])} at {length:,}, as T^{numbers['time']:.1f}; memory grows as T^{numbers['memory']:.1f}. "
        f"Attention of this width: {duration(other[-1])}, T^{numbers['attention']:.1f}. A generated token takes "
        f"{duration(tokens[0])} after {spans[0]} tokens, {duration(tokens[1])} after {spans[1]:,}."
    ), numbers)  # fmt: skip


def _step(subject: Subject, x: Tensor) -> None:
    output = subject.read(x.requires_grad_())[0]
    if output.requires_grad:
        output.sum().backward()
    subject.module.zero_grad()


def _step_time(subject: Subject, length: int) -> float:
    """The median time of up to five steps; long steps are taken less often."""
    x, times = subject.draw(1, length), list[float]()
    _step(subject, x)
    while len(times) < 5 and sum(times) < 0.5:
        begin = time.perf_counter()
        _step(subject, x)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


@torch.no_grad()
def _token_time(subject: Subject, length: int) -> float:
    state, times, x = subject.read(subject.draw(1, length))[1], list[float](), subject.draw(1, 1)
    while len(times) < 7 and sum(times) < 0.5:
        begin = time.perf_counter()
        subject.read(x, state)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _exponent(sizes: list[float]) -> float:
    """The exponent of growth over the last two doublings."""
    last = sizes[-3:]
    return math.log2(last[-1] / last[0]) / max(len(last) - 1, 1)


def _quadratic_share(works: list[float]) -> float:
    """The share of c in a + b T + c T^2 through the last three texts, whose lengths double."""
    if len(works) < 3:
        return 0.0
    first, middle, last = works[-3:]
    return (last - 3 * middle + 2 * first) / 3 * 8 / last  # c T^2 is a third of it at the middle's half


class _Meter(TorchDispatchMode):
    """Counts work (operations of products, and numbers written), and the most bytes alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.work, self.live, self.peak, self.known = 0.0, 0.0, 0.0, weakref.WeakSet[Any]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket in flop_registry:
            self.work += flop_registry[function.overloadpacket](*args, **(kwargs or {}), out_val=result)
        elif "scaled_dot_product" in function.name() and "backward" not in function.name():
            self.work += 4 * args[0].numel() * args[1].shape[-2]
        for part in result if isinstance(result, tuple | list) else (result,):
            if isinstance(part, Tensor) and (storage := part.untyped_storage()) not in self.known:
                self.work += part.numel()
                self.known.add(storage)
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._free, storage.nbytes())
        return result

    def _free(self, size: int) -> None:
        self.live -= size


class _Attention(nn.Module):
    """Causal attention with one head, as a yardstick."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.read, self.write = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x_BTD: Tensor, state: Any, layout: Any) -> tuple[Tensor, None]:
        parts = (part[:, None] for part in self.read(x_BTD).chunk(3, dim=-1))
        return self.write(scaled_dot_product_attention(*parts, is_causal=True)[:, 0]), None
