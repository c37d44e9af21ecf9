"""The additive_ops file: pooling alone, over the whole past and over windows, for ordinary and extreme logits."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from multilin.ops.prefix_softmax import prefix_softmax

Compared = tuple[str, np.ndarray, np.ndarray]


def check(file: Any) -> Iterator[Compared]:
    """(array, ours, expected): `CASE.global` and `CASE.window{k}` with their gradients, `doc.*` and `rnn.*`."""
    for name in file.files:
        case, _, kind = name.rpartition(".")
        if kind != "global" and not kind.removeprefix("window").isdigit():
            continue
        window = None if kind == "global" else int(kind.removeprefix("window"))
        if f"{case}.logits" in file.files:
            yield from _pooled(file, name, case, window)
        elif f"{case}.x" in file.files and f"{case}.w" in file.files:
            values = _tensor(file, f"{case}.x")
            logits = values @ _tensor(file, f"{case}.w") * values.shape[-1] ** -0.5
            means, _ = prefix_softmax(logits[..., None], values[..., None, :], window=window)
            yield name, means[..., 0, :].numpy(), file[name]
    yield from _running_sums(file)


def _pooled(file: Any, name: str, case: str, window: int | None) -> Iterator[Compared]:
    """The means, where they are defined, and the gradients of sum(U * means)."""
    logits = _tensor(file, f"{case}.logits").requires_grad_()
    values = _tensor(file, "X")[:, : logits.shape[1]].clone().requires_grad_()
    means, _ = prefix_softmax(logits, values, window=window)
    yield name, means.detach().numpy(), file[name]
    if f"{name}.defined" in file.files:
        defined = file[f"{name}.defined"].astype(bool)
        yield f"{name}.defined", _reads_any(logits.detach(), window).numpy(), defined
    gradients = [part for part in ("dlogits", "dX") if f"{name}.{part}" in file.files]
    if gradients:
        weights = next(_tensor(file, u) for u in (f"{name}.U", f"{case}.U", "U") if u in file.files)
        (means * weights[:, : logits.shape[1]]).sum().backward()
        for part in gradients:
            gradient = logits.grad if part == "dlogits" else values.grad
            assert gradient is not None
            expected = file[f"{name}.{part}"]
            yield f"{name}.{part}", gradient[:, : expected.shape[1]].numpy(), expected


def _reads_any(logits: Tensor, window: int | None) -> Tensor:
    """Whether a position reads a token of any weight: the mean of ones is then 1, else 0."""
    means, _ = prefix_softmax(logits, torch.ones_like(logits)[..., None], window=window)
    return means[..., 0] > 0.5


def _running_sums(file: Any) -> Iterator[Compared]:
    """s / z and s' / z' of the recurrences, over the past and over 5 tokens: the ratios are the means."""
    parts = {name.removeprefix("rnn."): file[name] for name in file.files if name.startswith("rnn.")}
    for name, sums in parts.items():
        if not name.startswith("s") or f"z{name[1:]}" not in parts:
            continue
        weights = parts[f"z{name[1:]}"]
        means, _ = prefix_softmax(_tensor(file, "random.logits"), _tensor(file, "X"), window=5 if name[1:] else None)
        yield f"rnn.{name} / z{name[1:]}", means.numpy(), sums / weights.reshape(*sums.shape[:3], 1)


def _tensor(file: Any, name: str) -> Tensor:
    return torch.from_numpy(file[name]).double()
