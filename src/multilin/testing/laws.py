"""The laws of a layer. Each function checks one, and returns a `Finding` with the numbers and the likely cause."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from multilin.errors import listed
from multilin.testing.subject import Subject, noise

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


def _failure(name: str, what: str, cause: str, result: Literal["failure", "warning"] = "failure") -> Finding:
    return Finding(name, result, f"{what}. Likely cause: {cause}.")


@torch.no_grad()
def causal(subject: Subject, length: int = LENGTH) -> Finding:
    """No output depends on a later token: neither its value, also for extreme tokens, nor its gradient."""
    x, half, rounds = subject.draw(1, length), length // 2, ""
    before = subject.read(x)[0][0]
    eps = torch.finfo(before.dtype).eps
    for scale in subject.scales:
        for first, last in ((half, half + 1), (1, 2), (length - 1, length), (half, length)):
            changed = x.clone()
            changed[:, first:last] = subject.draw(1, last - first, seed=2) if scale == 1 else scale * x[:, first:last]
            change_T = (subject.read(changed)[0][0, :first] - before[:first]).abs().amax(-1)
            if leaks := (~(change_T <= 1e3 * eps * before.abs().max())).nonzero()[:, 0].tolist():
                change = float(change_T.max())
                if scale > 1 and 1e-3 < change / (eps * scale) < 1e3:  # an FFT rounds to the size of the largest number
                    rounds = f", but for rounding: a token of size {scale:.0e} changes earlier outputs by {change:.0e}"
                    continue
                size = "" if scale == 1 else f" to the size {scale:.0e}"
                what = (
                    f"Output {leaks[-1]} changes by {change_T[leaks[-1]]:.1e} when token {first} does{size}: it reads "
                    f"{first - leaks[-1]} ahead, as do {len(leaks)} of {first} earlier outputs"
                )
                cause = f"a convolution, shift, chunk or mask that is wrong by {first - leaks[0]}"
                if len(leaks) == first > 1:
                    cause = "a mean, norm, softmax or sum without a mask, over all tokens of a call"
                    cause = cause if scale == 1 else "a maximum or another scale of all tokens of a call"
                return _failure("causal", what, cause)
    if x.is_floating_point():
        size_T = _gradient_size(subject, x, slice(half))
        if size_T[half:].max() > 1e3 * eps * size_T.max():
            what = f"Outputs have a gradient of {size_T[half:].max():.1e} for later tokens, although no value changes"
            return _failure("causal", what, "a backward pass of your own, or a detached path, that reads ahead")
    return Finding("causal", "ok", f"Outputs and gradients of {length} tokens depend on no later token{rounds}.")


@torch.enable_grad()
def _gradient_size(subject: Subject, x: Tensor, outputs: slice, cuts: Sequence[int] = ()) -> Tensor:
    """The size of the gradient of some outputs for each token, (T,)."""
    x = x.clone().requires_grad_()
    chosen = subject.read_pieces(x, cuts)[:, outputs]
    loss = (chosen * noise(chosen, seed=7)).sum() + 0 * x.sum()
    return torch.autograd.grad(loss, x)[0].abs().amax((0, 2))


@torch.no_grad()
def rows_independent(subject: Subject, length: int = 40) -> Finding:
    """A row gives the same outputs beside other rows, alone, and when its state is taken out of a batch."""
    x, half = subject.draw(3, length), length // 2
    together, (_, state) = subject.read_pieces(x, [half]), subject.read(x[:, :half])
    for scale in subject.scales[:3]:
        for row in (0, 2):
            other = x.clone()
            other[row] = scale * subject.draw(1, length, seed=2)[0]
            if change := difference(subject.read_pieces(other, [half])[1], together[1], subject):
                what = f"Row 1 changes by {change:.1e} when row {row} does"
                return _failure("rows", what, "a mean or norm over the batch, or a state or buffer that rows share")
    for row in range(3):
        if change := difference(subject.read_pieces(x[row : row + 1], [half])[0], together[row], subject):
            what = f"Row {row} alone differs by {change:.1e} from the same row in a batch of 3"
            return _failure("rows", what, "a formula with the number of rows, or a state whose first axis is another")
    onward = subject.read(x[[2, 0], half:], subject.select(state, [2, 0]))[0]
    if change := difference(onward, together[[2, 0], half:], subject):
        what = f"With the states of rows 2 and 0 taken out of a batch, outputs differ by {change:.1e}"
        return _failure(
            "rows", what, "a part of the state whose first axis is not the batch, or a buffer that keeps rows"
        )
    return Finding(
        "rows", "ok", "A row gives the same outputs in a batch of 3, alone, and from a state taken out of it."
    )


@torch.no_grad()
def deterministic(subject: Subject) -> Finding:
    """The same call gives the same output, also after other calls, and leaves the state that it was given."""
    x = subject.draw(2, 12)
    torch.manual_seed(0)
    first, state = subject.read(x)
    subject.read(subject.draw(3, 7, seed=2))
    if not torch.equal((second := subject.read(x)[0]).nan_to_num(), first.nan_to_num()):
        what = f"The same call gives outputs that differ by {float((first - second).abs().max()):.1e}"
        torch.manual_seed(0)
        is_random = torch.equal(first, subject.read(x)[0])
        cause = "dropout or noise that is on in evaluation" if is_random else "a buffer that one call leaves to another"
        return _failure("deterministic", what, cause)
    if not torch.equal(*(subject.read(x, state)[0].nan_to_num() for _ in range(2))):
        what = "Two calls from the same state give different outputs"
        return _failure("deterministic", what, "forward changes the state in place; clone it first")
    return Finding("deterministic", "ok", "The same call gives the same bits, also after other calls.")


@torch.no_grad()
def training_is_evaluation(subject: Subject) -> Finding:
    """With dropout at 0, training and evaluation give the same outputs."""
    trained, x = subject.copy(), subject.draw(2, 12)
    for module in trained.module.train().modules():
        for key, value in list(vars(module).items()):
            if isinstance(value, float) and ("drop" in key or (key == "p" and "Dropout" in type(module).__name__)):
                setattr(module, key, 0.0)
    outputs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outputs.append(trained.read(x)[0])
    if torch.equal(*outputs[:2]) and not torch.equal(*outputs[1:]):
        return Finding("train = eval", "says", "Training draws random numbers, so it was not compared with evaluation.")
    if change := difference(outputs[0], subject.read(x)[0], subject):
        what = f"Training and evaluation differ by {change:.1e} with dropout at 0"
        return _failure(
            "train = eval", what, "statistics of the batch, as in BatchNorm, or another use of self.training"
        )
    return Finding("train = eval", "ok", "Training and evaluation give the same outputs (dropout at 0).")


@torch.no_grad()
def pieces_are_whole(subject: Subject, cuts: Sequence[int] | None = None, length: int = LENGTH) -> Finding:
    """A text read in pieces, with the state handed on, gives the outputs of the text read at once.

    Args:
        subject: what reads.
        cuts: where pieces end; several splits, some of them random, if not given.
        length: number of tokens.
    """
    x, draw = subject.draw(2, length), random.Random(0)
    splits = [[length // 2], [length - 1], [1, 2, 4, *range(9, 30), 64]] if cuts is None else [list(cuts)]
    splits += [sorted(draw.sample(range(1, length), 3)) for _ in range(3)] if cuts is None else []
    whole = subject.read(x)[0]
    for split in splits:
        found = subject.read_pieces(x, split)
        if change := difference(found, whole, subject):
            is_wrong_T = ~((found - whole).abs().amax((0, 2)) <= subject.tolerance * whole.abs().max())
            wrong = is_wrong_T.nonzero()[:, 0].tolist() or [0]
            what = (
                f"In pieces that end at {split[:4]}, {len(wrong)} outputs from token {wrong[0]} differ by {change:.1e}"
            )
            return _failure("pieces", what, _why_broken(subject, x, found, wrong, split))
    if x.is_floating_point():
        half = length // 2
        at_once, apart = (_gradient_size(subject, x, slice(half, None), cuts)[:half].max() for cuts in ([], [half]))
        if at_once > 0 == apart:
            what = "The state is detached: training on a text in pieces gets no gradient through it."
            return Finding("pieces", "warning", what)
    return Finding("pieces", "ok", f"{length} tokens in pieces of any length give the outputs of the whole text.")


def _why_broken(subject: Subject, x: Tensor, found: Tensor, wrong: list[int], split: list[int]) -> str:
    cut = max((cut for cut in split if cut <= wrong[0]), default=0)
    end = min((other for other in split if other > cut), default=x.shape[1])
    if not subject.has_state or not cut:
        return "positions, a norm or a padding that depend on the number of tokens in the call"
    if not difference(found[:, cut:end], subject.read(x[:, cut:end])[0], subject):
        return "forward does not use the state that it is given"
    if wrong[-1] < end - 1:
        return "the state misses the last tokens that a convolution or a window reads"
    return "the state misses something, or positions begin again in each call"


@torch.no_grad()
def state_size(subject: Subject, lengths: Sequence[int] = (64, 192, 768)) -> Finding:
    """The bytes of one row's state after pieces of these lengths: `numbers` has the smallest, the last, the growth."""
    state, sizes, num_tokens = None, list[int](), 0
    for length in lengths:
        if subject.longest is None or num_tokens + length <= subject.longest:
            state, num_tokens, last = subject.read(subject.draw(1, length), state)[1], num_tokens + length, length
            sizes.append(sum(part.nbytes for part in subject.tensors(state)))
    growth = (sizes[-1] - sizes[-2]) / last if len(sizes) > 1 else 0.0
    numbers = {"smallest": float(min(sizes)), "bytes": float(sizes[-1]), "growth": growth}
    held = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in subject.tensors(state)}
    words = f"is bounded, {sizes[-1]:,} bytes"
    if growth:
        words = f"grows by {growth:,.4g} bytes per token, to {sizes[-1]:,} after {num_tokens:,}"
    words = f"The state {words}" if subject.has_state else f"No state: the text, read again for each token, {words}"
    kept = f"; its tensors are views that keep {sum(held.values()):,} bytes" if sum(held.values()) > sizes[-1] else ""
    kinds = (part.dtype for part in subject.tensors(state) if part.is_floating_point())
    if low := next((kind for kind in kinds if torch.finfo(kind).eps > 1e-4), None):
        return Finding("state", "warning", f"{words}. It is kept in {low}, so errors add up: use float32.", numbers)
    return Finding("state", "says", f"{words}{kept}.", numbers)


def finite(subject: Subject) -> Finding:
    """Outputs and gradients are finite: for tokens of any size, short texts, equal tokens, and in bf16.

    Only what happens at ordinary sizes is a failure.
    """
    subject = subject.cast(torch.float32)
    x = subject.draw(2, 16)
    cases = {
        "1 token": x[:, :1], "2 tokens": x[:, :2], "ordinary tokens": x, "equal tokens": x[:, :1].expand(-1, 16, -1),
        **{f"tokens of size {scale:.0e}": scale * x for scale in (1e-3, 1e-2, 1e2, 1e4)}, "tokens of size 0": 0 * x,
    }  # fmt: skip
    bad = {case: what for case, given in cases.items() if (what := _not_finite(subject, given))}
    error, note, result = 0.0, "", "ok"
    try:
        with torch.autocast("cpu", torch.bfloat16):
            if what := _not_finite(subject, x):
                bad["ordinary tokens in bf16"] = what
            rounded = subject.read(x)[0].detach().float()
        exact = subject.read(x)[0].detach()
        error = float((rounded - exact).norm() / exact.norm().clamp(min=1e-30))
        note = f"bf16 differs by {error:.1%}"
    except (RuntimeError, TypeError) as failure:
        note = f"bf16 was not checked ({brief(failure)})"
        if "not implemented" not in str(failure):
            error, note = 1.0, f"training in bf16 will fail ({brief(failure)})"
    if bad:
        what = f"Not finite: {listed([f'{what} for {case}' for case, what in bad.items()][:3])}"
        result = "failure" if any("size" not in case for case in bad) else "warning"
        cause = "a division by a sum, deviation or norm that is 0, or an exponential without its maximum subtracted"
        return _failure("finite", what, cause, result)  # type: ignore[arg-type]
    what = f"Outputs and gradients are finite for tokens of size 1e-3 to 1e4; {note}."
    return Finding("finite", "warning" if error > 0.1 else "ok", what, {"bf16": error})


def _not_finite(subject: Subject, x: Tensor) -> str:
    """The outputs or gradients, if they are not finite."""
    x = x.clone().requires_grad_()
    output = subject.read(x)[0]
    if not output.isfinite().all():
        return "outputs"
    tensors = [x, *(p for p in subject.module.parameters() if p.requires_grad)]
    loss = (output * noise(output, seed=7)).sum() + 0 * x.sum()
    found = torch.autograd.grad(loss, tensors, materialize_grads=True, allow_unused=True)
    return "" if all(part.isfinite().all() for part in found) else "gradients"


def gradients(subject: Subject, length: int = 6) -> Finding:
    """Every parameter gets a gradient, and gradients are those of finite differences."""
    noisy = subject.copy()
    trained = {
        name.partition("module.")[2] or name: p for name, p in noisy.module.named_parameters() if p.requires_grad
    }

    with torch.no_grad():
        for parameter in trained.values():  # where one is zero, others may have no gradient
            parameter += 0.1 * noise(parameter, seed=3)
    x = noisy.draw(1, length).requires_grad_()

    def loss() -> Tensor:
        output = noisy.read_pieces(x, [length // 2])
        return (output * noise(output, seed=7)).sum()

    tensors = {"the input": x, **trained}
    if not (value := loss()).requires_grad:
        return _failure("gradients", "Outputs have no gradient", "detach or no_grad in forward", "warning")
    found = dict(zip(tensors, torch.autograd.grad(value, list(tensors.values()), allow_unused=True), strict=True))
    if idle := [name for name, part in found.items() if part is None or not part.any()]:
        what = f"No gradient reaches {listed(idle[:4])}"
        return _failure("gradients", what, "forward does not use it, or detaches what it gives", "warning")
    if subject.tolerance > 1e-10:
        return Finding("gradients", "ok", "Gradients reach every parameter (float64 is needed for finite differences).")
    for name, tensor in tensors.items():
        along = noise(tensor, seed=5)
        expected, slope = _slope(loss, tensor, along), float((found[name] * along).sum())
        if not abs(slope - expected) <= 1e-4 * max(abs(slope), abs(expected)) + 1e-6:
            what = (
                f"The gradient of {name} is {slope:.3g} in a direction in which finite differences give {expected:.3g}"
            )
            return _failure("gradients", what, "detach, rounding, or a backward pass of your own", "warning")
    return Finding("gradients", "ok", "Gradients reach every parameter and equal finite differences.")


@torch.no_grad()
def _slope(loss: Any, tensor: Tensor, along: Tensor, step: float = 1e-6) -> float:
    """The central difference of the loss along a direction."""
    start, values = tensor.clone(), []
    for sign in (1, -1):
        tensor.copy_(start + sign * step * along)
        values.append(float(loss()))
    tensor.copy_(start)
    return (values[0] - values[1]) / (2 * step)


def difference(found: Tensor, expected: Tensor, subject: Subject) -> float:
    """The largest difference; 0.0 if it is within the tolerance; nan if only one of the two is finite."""
    if not torch.equal(found.isfinite(), expected.isfinite()):
        return float("nan")
    size = float((found - expected).nan_to_num().abs().max())
    return size if size > subject.tolerance * float(expected.nan_to_num().abs().max()) else 0.0


def brief(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:160]
