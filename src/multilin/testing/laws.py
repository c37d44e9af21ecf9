"""The laws of a layer. Each function checks one, and returns a `Finding` with the numbers and the likely cause."""

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from multilin.errors import listed
from multilin.layers.plain import PlainMixer
from multilin.testing.subject import LayerSubject, Subject

LENGTH = 70
"""Tokens of a text: more than one chunk of 64, and no multiple of it."""


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    name: what was checked.
    result: failure if results would be wrong; warning; ok; or says, for a property that is neither right nor wrong.
    sentence: the numbers, and for a failure the likely cause.
    numbers: measured values by name.
    """

    name: str
    result: Literal["ok", "says", "warning", "failure"]
    sentence: str
    numbers: dict[str, float] = field(default_factory=dict)


@torch.no_grad()
def causal(subject: Subject, length: int = LENGTH) -> Finding:
    """No output depends on a later token: neither its value, also for extreme tokens, nor its gradient."""
    x, note, name = subject.draw(1, length), "", "causal"
    before = subject.read(x)[0][0]
    eps = torch.finfo(before.dtype).eps
    for scale in subject.scales:
        for first, last in ((length // 2, length // 2 + 1), (1, 2), (length - 1, length), (length // 2, length)):
            changed = x.clone()
            changed[:, first:last] = subject.draw(1, last - first, seed=2) if scale == 1 else scale * x[:, first:last]
            change_T = (subject.read(changed)[0][0, :first] - before[:first]).abs().amax(-1)
            if leaks := (~(change_T <= 1e3 * eps * before.abs().max())).nonzero()[:, 0].tolist():
                change = float(change_T.max())
                if scale > 1 and 1e-3 < change / (eps * scale) < 1e3:  # an FFT rounds to the size of the largest number
                    note = f"; a token of size {scale:.0e} changes earlier outputs by {change:.0e}, as rounding"
                    continue
                size = "" if scale == 1 else f" to the size {scale:.0e}"
                return Finding(name, "failure", (
                    f"Output {leaks[-1]} changes when token {first} does{size}, so it reads {first - leaks[-1]} ahead "
                    f"(by {change:.1e}; outputs {leaks[0]} to {leaks[-1]}). Likely cause: {_leak(leaks, first, scale)}."
                ))  # fmt: skip
    if x.is_floating_point() and (found := _gradient_leak(subject, x)):
        return Finding(name, "failure", found)
    return Finding(name, "ok", f"Outputs and gradients of {length} tokens depend on no later token{note}.")


def _leak(leaks: Sequence[int], first: int, scale: float) -> str:
    if len(leaks) == first > 1:
        over = "a maximum or another scale" if scale > 1 else "a mean, norm, softmax or sum without a mask"
        return f"{over} over all tokens of a call"
    return f"a convolution, shift or mask that is wrong by {first - leaks[0]}"


@torch.enable_grad()
def _gradient_leak(subject: Subject, x: Tensor) -> str:
    x, first = x.clone().requires_grad_(), x.shape[1] // 2
    output = subject.read(x)[0][:, :first]
    if not output.requires_grad:
        return ""
    gradient_T = torch.autograd.grad((output * _weights(output)).sum(), x)[0].abs().amax((0, 2))
    if gradient_T[first:].max() <= 1e3 * torch.finfo(x.dtype).eps * gradient_T.max():
        return ""
    return (
        f"Outputs before token {first} have a gradient of {gradient_T[first:].max():.1e} for later tokens, although "
        "their values do not change. Likely cause: a backward pass or a detached path that reads ahead."
    )


@torch.no_grad()
def rows_independent(subject: Subject, length: int = 40) -> Finding:
    """A row gives the same outputs beside other rows, alone, and when its state is taken out of a batch."""
    x, name, half = subject.draw(3, length), "rows", length // 2
    together, (_, state) = subject.read_pieces(x, [half])[0], subject.read(x[:, :half])
    for scale in subject.scales[:3]:
        other = x.clone()
        other[1] = scale * subject.draw(1, length, seed=2)[0]
        if change := _difference(subject.read_pieces(other, [half])[0][::2], together[::2], subject):
            return Finding(name, "failure", (
                f"Rows change by {change:.1e} when another row of the batch does. Likely cause: a mean or norm over "
                "the batch, or a state or buffer that rows share."
            ))  # fmt: skip
    for row in range(3):
        if change := _difference(subject.read_pieces(x[row : row + 1], [half])[0][0], together[row], subject):
            return Finding(name, "failure", (
                f"A row alone differs by {change:.1e} from the same row in a batch of 3. Likely cause: a formula with "
                "the number of rows, or a state whose first axis is not the batch."
            ))  # fmt: skip
    onward = subject.read(x[[2, 0], half:], subject.select(state, [2, 0]))[0]
    if change := _difference(onward, together[[2, 0], half:], subject):
        return Finding(name, "failure", (
            f"With the states of rows 2 and 0 taken out of a batch, outputs differ by {change:.1e}. Likely cause: a "
            "part of the state whose first axis is not the batch, or a buffer that keeps rows."
        ))  # fmt: skip
    return Finding(name, "ok", "A row gives the same outputs in a batch of 3, alone, and from a state taken out of it.")


@torch.no_grad()
def deterministic(subject: Subject) -> Finding:
    """The same call gives the same output, also after other calls, and leaves the state that it was given."""
    x, name = subject.draw(2, 12), "deterministic"
    torch.manual_seed(0)
    first = subject.read(x)[0]
    subject.read(subject.draw(3, 7, seed=2))
    second = subject.read(x)[0]
    if not torch.equal(first.nan_to_num(), second.nan_to_num()):
        torch.manual_seed(0)
        is_random = torch.equal(first, subject.read(x)[0])
        cause = "dropout or noise that is on in evaluation" if is_random else "a buffer that one call leaves to another"
        change = float((first - second).abs().max())
        return Finding(name, "failure", f"The same call gives outputs that differ by {change:.1e}. Likely cause: {cause}.")
    _, state = subject.read(x)
    onward = [subject.read(x, state)[0] for _ in range(2)]
    if not torch.equal(*onward):
        cause = "the state is changed in place; clone it first"
        return Finding(name, "failure", f"Two calls from the same state give different outputs. Likely cause: {cause}.")
    return Finding(name, "ok", "The same call gives the same bits, also after other calls.")


@torch.no_grad()
def training_is_evaluation(subject: Subject) -> Finding:
    """With dropout at 0, training and evaluation give the same outputs."""
    trained, x, name = copy.copy(subject), subject.draw(2, 12), "train = eval"
    trained.module = copy.deepcopy(subject.module).train()
    expected, dropped = subject.read(x)[0], 0
    for module in trained.module.modules():
        for key, value in list(vars(module).items()):
            is_rate = "drop" in key or (key == "p" and "Dropout" in type(module).__name__)
            if is_rate and isinstance(value, int | float) and not isinstance(value, bool):
                setattr(module, key, 0.0)
                dropped += 1
    found, again = trained.read(x)[0], trained.read(x)[0]
    if not torch.equal(found, again):
        torch.manual_seed(0)
        found = trained.read(x)[0]
        torch.manual_seed(0)
        if torch.equal(found, trained.read(x)[0]):
            return Finding(name, "says", "Training draws random numbers, so it was not compared with evaluation.")
    if change := _difference(found, expected, subject):
        return Finding(name, "failure", (
            f"Training and evaluation differ by {change:.1e} with dropout at 0. Likely cause: statistics of the batch, "
            "as in BatchNorm, or another use of self.training."
        ))  # fmt: skip
    return Finding(name, "ok", f"Training and evaluation give the same outputs{' with dropout at 0' if dropped else ''}.")


@torch.no_grad()
def pieces_are_whole(subject: Subject, cuts: Sequence[int] | None = None, length: int = LENGTH) -> Finding:
    """A text read in pieces, with the state handed on, gives the outputs of the text read at once.

    Args:
        subject: what reads.
        cuts: where pieces end; token by token and some random ones if not given.
        length: number of tokens.
    """
    x, name, draw = subject.draw(2, length), "pieces", random.Random(0)
    whole, state = subject.read(x)
    splits = [list(cuts)] if cuts is not None else [[1, 2, 4, *range(9, 30), 64], [length // 2], [length - 1]]
    splits += [] if cuts is not None else [sorted(draw.sample(range(1, length), 3)) for _ in range(3)]
    more = subject.draw(2, 1, seed=3) if subject.longest is None or length < subject.longest else None
    for split in splits:
        found, after = subject.read_pieces(x, split)
        if change := _difference(found, whole, subject):
            return Finding(name, "failure", _break(subject, x, whole, found, split, change))
        if more is not None and (
            change := _difference(subject.read(more, after)[0], subject.read(more, state)[0], subject)
        ):
            return Finding(name, "failure", (
                f"After pieces that end at {split}, the next output differs by {change:.1e}. Likely cause: the state "
                "misses tokens of short pieces."
            ))  # fmt: skip
    if x.is_floating_point() and _is_detached(subject, x):
        return Finding(name, "warning", "The state is detached: training on texts in pieces gets no gradient through it.")
    return Finding(name, "ok", f"{length} tokens in pieces of any length give the outputs of the whole text.")


def _break(subject: Subject, x: Tensor, whole: Tensor, found: Tensor, split: list[int], change: float) -> str:
    is_wrong_T = ~((found - whole).abs().amax((0, 2)) <= 10 * subject.tolerance * whole.abs().max())
    wrong = is_wrong_T.nonzero()[:, 0].tolist() or [0]
    cut = max((cut for cut in split if cut <= wrong[0]), default=0)
    ends = [other for other in split if other > cut] + [x.shape[1]]
    stated = any(not isinstance(part, PlainMixer) or part.signature.has_state for part in subject.module.children())
    after, last = subject.read(x[:, cut:])[0], wrong[-1] - cut + 1
    if not stated or wrong[0] < split[0]:
        cause = "positions, a norm or a padding that depend on the number of tokens in the call"
    elif not _difference(found[:, cut : ends[0]], after[:, : ends[0] - cut], subject):
        cause = "forward does not use the state that it is given"
    elif len(split) == 1 and last < x.shape[1] - cut:
        cause = f"the state misses the last tokens that a convolution or a window reads; {last} outputs are wrong"
    else:
        cause = "the state misses something, such as a convolution's last tokens, or positions begin again in each call"
    return f"In pieces that end at {split[:4]}, outputs from token {wrong[0]} differ by {change:.1e}. Likely cause: {cause}."


@torch.enable_grad()
def _is_detached(subject: Subject, x: Tensor) -> bool:
    """Whether the second half has no gradient for the first, but has one where both are read at once."""
    sizes, half = [], x.shape[1] // 2
    for cuts in ([], [half]):
        given = x.clone().requires_grad_()
        output = subject.read_pieces(given, cuts)[0][:, half:]
        if not output.requires_grad:
            return False
        sizes.append(float(torch.autograd.grad((output * _weights(output)).sum(), given)[0][:, :half].abs().max()))
    return sizes[0] > 0 and sizes[1] == 0


@torch.no_grad()
def state_size(subject: Subject, lengths: Sequence[int] = (64, 192, 768)) -> Finding:
    """The size of one row's state after pieces of these lengths, and its growth."""
    state, sizes, num_tokens = None, list[int](), 0
    for length in lengths:
        num_tokens += length
        if subject.longest is None or num_tokens <= subject.longest:
            state = subject.read(subject.draw(1, length), state)[1]
            sizes.append(sum(part.nbytes for part in subject.tensors(state)))
            ends = num_tokens
    numbers = {"bytes": float(sizes[-1]), "smallest": float(min(sizes))}
    held = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in subject.tensors(state)}
    kept = f"; its tensors are views that keep {sum(held.values()):,} bytes" if sum(held.values()) > sizes[-1] else ""
    growth = (sizes[-1] - sizes[-2]) / lengths[len(sizes) - 1] if len(sizes) > 1 else 0.0
    numbers["bytes per token"] = growth
    words = f"grows by {growth:,.4g} bytes per token, to {sizes[-1]:,} after {ends:,}" if growth else (
        f"is bounded, {sizes[-1]:,} bytes"
    )  # fmt: skip
    modules = subject.module.children()
    has_state = any(not isinstance(part, PlainMixer) or part.signature.has_state for part in modules)
    return Finding("state", "says", f"The state {words}{kept}." if has_state else f"There is no state: the text, read again for each token, {words}.", numbers)


def finite(subject: Subject) -> Finding:
    """Outputs and gradients are finite: for tokens of any size, short texts, equal tokens, and in bf16.

    Only what happens at ordinary sizes is a failure.
    """
    name, plain = "finite", subject.cast(torch.float32)
    x = plain.draw(2, 16)
    cases = {
        "1 token": x[:, :1], "2 tokens": x[:, :2], "ordinary tokens": x, "equal tokens": x[:, :1].expand(-1, 16, -1),
        **{f"tokens of size {scale:.0e}": scale * x for scale in (1e-3, 1e-2, 1e2, 1e4)}, "zeros": 0 * x,
    }  # fmt: skip
    bad = {}
    for case, given in cases.items():
        if found := _not_finite(plain, given):
            bad[case] = found
    error, note = 0.0, ""
    try:
        with torch.autocast("cpu", torch.bfloat16):
            if found := _not_finite(plain, x):
                bad["ordinary tokens in bf16"] = found
            rounded = plain.read(x)[0].detach().float()
        exact = plain.read(x)[0].detach()
        error = float((rounded - exact).norm() / exact.norm().clamp(min=1e-30))
        note = f", and bf16 differs by {error:.1%}"
    except (RuntimeError, TypeError, NotImplementedError) as failure:
        note = f"; bf16 was not checked ({brief(failure)})"
        if "not implemented" not in str(failure):
            return Finding(name, "warning", f"Training in bf16 will fail: {brief(failure)}.")
    wrong = [f"{what} for {case}" for case, what in bad.items()]
    if wrong:
        is_ordinary = any("size" not in case and case != "zeros" for case in bad)
        return Finding(name, "failure" if is_ordinary else "warning", (
            f"Not finite: {listed(wrong[:3])}. Likely cause: a division by a sum, deviation or norm that is 0, or an "
            "exponential without a maximum subtracted."
        ))  # fmt: skip
    result: Literal["ok", "warning"] = "warning" if error > 0.1 else "ok"
    return Finding(name, result, f"Outputs and gradients are finite for tokens of size 1e-3 to 1e4{note}.", {"bf16": error})


def _not_finite(subject: Subject, x: Tensor) -> str:
    """The outputs or gradients, if they are not finite."""
    x = x.clone().requires_grad_()
    output = subject.read(x)[0]
    if not output.isfinite().all():
        return "outputs"
    if output.requires_grad:
        parameters = [x, *(p for p in subject.module.parameters() if p.requires_grad)]
        gradients = torch.autograd.grad((output * _weights(output)).sum(), parameters, allow_unused=True)
        if not all(gradient is None or gradient.isfinite().all() for gradient in gradients):
            return "gradients"
    return ""


def gradients(subject: Subject, length: int = 6) -> Finding:
    """Every parameter gets a gradient, and gradients are those of finite differences."""
    name, noisy = "gradients", copy.copy(subject)
    noisy.module = copy.deepcopy(subject.module)
    trained = {key: p for key, p in noisy.module.named_parameters() if p.requires_grad}
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in trained.values():  # where one is zero, others may have no gradient
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter)
    x = noisy.draw(1, length).requires_grad_()

    def loss() -> Tensor:
        output = noisy.read_pieces(x, [length // 2])[0]
        return (output * _weights(output)).sum()

    tensors = {"the input": x, **trained}
    if not loss().requires_grad:
        return Finding(name, "warning", "Outputs have no gradient at all. Likely cause: detach or no_grad in forward.")
    found = torch.autograd.grad(loss(), list(tensors.values()), allow_unused=True)
    by_name = dict(zip(tensors, found, strict=True))
    idle = [key.partition("module.")[2] or key for key, part in by_name.items() if part is None or not part.any()]
    if idle:
        return Finding(name, "warning", (
            f"No gradient reaches {listed(idle[:4])}. Likely cause: forward does not use it, or detaches what it gives."
        ))  # fmt: skip
    if x.dtype != torch.float64 or subject.tolerance > 1e-9:
        return Finding(name, "ok", "Gradients reach every parameter; finite differences need float64, so none were taken.")
    for key, tensor in tensors.items():
        along = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        expected, slope = _slope(loss, tensor, along), float((by_name[key] * along).sum())
        if abs(slope - expected) > 1e-4 * max(abs(slope), abs(expected)) + 1e-6:
            return Finding(name, "warning", (
                f"The gradient of {key.partition('module.')[2] or key} is {slope:.3g} along a line where finite "
                f"differences give {expected:.3g}. Likely cause: detach, rounding, or a backward pass of your own."
            ))  # fmt: skip
    return Finding(name, "ok", "Gradients reach every parameter and equal finite differences.")


@torch.no_grad()
def _slope(loss: Any, tensor: Tensor, along: Tensor, step: float = 1e-6) -> float:
    """The central difference of the loss along a direction."""
    start, values = tensor.clone(), []
    for sign in (1, -1):
        tensor.copy_(start + sign * step * along)
        values.append(float(loss()))
    tensor.copy_(start)
    return (values[0] - values[1]) / (2 * step)


def widened(subject: Subject) -> Subject:
    """A copy in which parameters that are entirely zero are drawn, so that no part is hidden behind a zero."""
    other = copy.copy(subject)
    other.module = copy.deepcopy(subject.module)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in other.module.parameters():
            if not parameter.any():
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator).to(parameter)
    return other


def _weights(output: Tensor) -> Tensor:
    """Random weights of a sum."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output)


def _difference(found: Tensor, expected: Tensor, subject: Subject) -> float:
    """The largest difference, or 0.0 if it is below the tolerance; nan only equals nan in the same place."""
    if not torch.equal(found.isfinite(), expected.isfinite()):
        return float("nan")
    difference = float((found - expected).nan_to_num().abs().max())
    return difference if difference > subject.tolerance * max(float(expected.nan_to_num().abs().max()), 1e-30) else 0.0


def brief(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:160]
