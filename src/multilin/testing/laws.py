"""The laws of a layer. Each function checks one on a `Subject`, and returns a `Finding` with the likely cause."""

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from multilin.errors import listed
from multilin.layers.base import Layout
from multilin.layers.plain import PlainMixer

LENGTH = 70  # tokens of a text: more than one chunk of 64, and no multiple of it
Result = Literal["ok", "says", "warning", "failure"]


@dataclass(frozen=True)
class Finding:
    """The result of one check, in a sentence with the numbers and, for a failure, the likely cause."""

    name: str
    result: Result  # failure: results would be wrong; says: a property that is neither right nor wrong
    sentence: str
    numbers: dict[str, float] = field(default_factory=dict)  # measured values


class Subject:
    """Modules that are called with (x, state, layout) one after another, in the mode and dtype that they have.

    Args:
        layers, width, longest: the modules, D, and the most tokens that they read (None for no limit).
    """

    scales: tuple[float, ...] = (1.0, 1e3, 1e8, 1e30)  # sizes of a changed token

    def __init__(self, *layers: nn.Module, width: int, longest: int | None = None) -> None:
        self.module: nn.Module = nn.ModuleList(layers)
        self.width, self.longest = width, longest
        self.rounds_to = torch.float64  # the lowest precision that the modules compute in

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return next((p.dtype for p in self.module.parameters() if p.is_floating_point()), torch.get_default_dtype())

    @property
    def has_state(self) -> bool:
        """False if the text is read again for each new token."""
        return all(part.signature.has_state for part in self.module.modules() if isinstance(part, PlainMixer))

    def copy(self) -> Self:
        """A copy with weights of its own."""
        other = copy.copy(self)
        other.module = copy.deepcopy(self.module)
        return other

    def draw(self, rows: int, length: int, seed: int = 1) -> Tensor:
        """Random tokens, (B, T, D), normally distributed."""
        return noise(torch.empty(rows, length, self.width, dtype=self.dtype), seed)

    def read(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """The output, and the state: the number of tokens and the state of each layer; the given state stays."""
        layers = list(self.module.children())
        first, states = state or (0, [None] * len(layers))
        positions_BT = torch.arange(first, first + x.shape[1]).expand(x.shape[:2])
        after, x = [], x.clone()
        for layer, value in zip(layers, states, strict=True):
            x, value = layer(x, value, Layout(positions_BT))
            after.append(value)
        return x, (first + positions_BT.shape[1], after)

    def read_pieces(self, x: Tensor, cuts: Sequence[int]) -> Tensor:
        """The output for a text that is read in pieces, which end at the cuts."""
        outputs, state = [], None
        for piece in x.tensor_split(list(cuts), dim=1):
            output, state = self.read(piece, state)
            outputs.append(output)
        return torch.cat(outputs, dim=1)

    def select(self, state: Any, rows: list[int]) -> Any:
        """The state of these rows."""
        return state[0], tree_map(lambda part: part[rows] if isinstance(part, Tensor) else part, state[1])

    def tensors(self, state: Any) -> list[Tensor]:
        """The tensors of a state, without the sizes that `PlainState` adds."""
        return [part for part in tree_leaves([getattr(v, "value", v) for v in state[1]]) if isinstance(part, Tensor)]

    def difference(self, found: Tensor, expected: Tensor) -> float:
        """The largest difference; 0.0 if rounding explains it; nan if only one of the two is finite."""
        if not torch.equal(found.isfinite(), expected.isfinite()):
            return float("nan")
        eps = max(torch.finfo(self.dtype).eps, torch.finfo(self.rounds_to).eps)
        size, scale = (float(part.nan_to_num().abs().max()) for part in (found - expected, expected))
        return size if size > scale * (1e-10 if eps < 1e-10 else min(1e3 * eps, 0.05)) else 0.0


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
            leaks = (~(change_T <= 1e3 * eps * before.abs().max())).nonzero()[:, 0].tolist()
            if leaks and scale > 1 and 1e-3 < (change := float(change_T.max())) / (eps * scale) < 1e3:
                rounds = f", but for rounding: a token of size {scale:.0e} changes earlier outputs by {change:.0e}"
            elif leaks:  # an FFT only rounds to the size of the largest number
                size = "" if scale == 1 else f" to the size {scale:.0e}"
                what = (
                    f"Output {leaks[-1]} changes by {change_T[leaks[-1]]:.1e} when token {first} does{size}: it reads"
                )
                what += f" {first - leaks[-1]} ahead, as do {len(leaks)} of {first} earlier outputs"
                cause = f"a convolution, shift, chunk or mask that is wrong by {first - leaks[0]}"
                if len(leaks) == first > 1:
                    over = (
                        "a mean, norm, softmax or sum without a mask," if scale == 1 else "a maximum or another scale"
                    )
                    cause = f"{over} over all tokens of a call"
                return _failure("causal", what, cause)
    if x.is_floating_point():
        size_T = _backward(subject, x, slice(half))[1].abs().amax((0, 2))
        if size_T[half:].max() > 1e3 * eps * size_T.max():
            what = f"Outputs have a gradient of {size_T[half:].max():.1e} for later tokens, although no value changes"
            return _failure("causal", what, "a backward pass of your own, or a detached path, that reads ahead")
    return Finding("causal", "ok", f"Outputs and gradients of {length} tokens depend on no later token{rounds}.")


@torch.no_grad()
def rows_independent(subject: Subject, length: int = 40) -> Finding:
    """A row gives the same outputs beside other rows, alone, and when its state is taken out of a batch."""
    x, half = subject.draw(3, length), length // 2
    together, (_, state) = subject.read_pieces(x, [half]), subject.read(x[:, :half])
    for scale in subject.scales[:3]:
        for row in (0, 2):
            other = x.clone()
            other[row] = scale * subject.draw(1, length, seed=2)[0]
            if change := subject.difference(subject.read_pieces(other, [half])[1], together[1]):
                what = f"Row 1 changes by {change:.1e} when row {row} does"
                return _failure("rows", what, "a mean or norm over the batch, or a state or buffer that rows share")
    for row in range(3):
        if change := subject.difference(subject.read_pieces(x[row : row + 1], [half])[0], together[row]):
            what = f"Row {row} alone differs by {change:.1e} from the same row in a batch of 3"
            return _failure("rows", what, "a formula with the number of rows, or a state whose first axis is another")
    onward = subject.read(x[[2, 0], half:], subject.select(state, [2, 0]))[0]
    if change := subject.difference(onward, together[[2, 0], half:]):
        what = f"From the states of rows 2 and 0, taken out of a batch, outputs differ by {change:.1e}"
        return _failure("rows", what, "a state whose first axis is not the batch, or a buffer that keeps rows")
    return Finding("rows", "ok", "A row gives the same in a batch, alone, and from a state taken out of a batch.")


@torch.no_grad()
def deterministic(subject: Subject) -> Finding:
    """The same call gives the same output, also after other calls, and leaves the state that it was given."""
    x = subject.draw(2, 12)
    torch.manual_seed(0)
    first, state = subject.read(x)
    subject.read(subject.draw(3, 7, seed=2))
    if not torch.equal((second := subject.read(x)[0]).nan_to_num(), first.nan_to_num()):
        torch.manual_seed(0)
        is_random = torch.equal(first, subject.read(x)[0])
        what = f"The same call gives outputs that differ by {float((first - second).abs().max()):.1e}"
        cause = "dropout or noise that is on in evaluation" if is_random else "a buffer that one call leaves to another"
        return _failure("deterministic", what, cause)
    if not torch.equal(*(subject.read(x, state)[0].nan_to_num() for _ in range(2))):
        what = "Two calls from the same state give different outputs"
        return _failure("deterministic", what, "forward changes the state in place; clone it first")
    return Finding("deterministic", "ok", "The same call gives the same bits, also after other calls.")


@torch.no_grad()
def training_is_evaluation(subject: Subject) -> Finding:
    """With dropout at 0, training and evaluation give the same outputs."""
    name, trained, x, outputs = "train = eval", subject.copy(), subject.draw(2, 12), []
    for module in trained.module.train().modules():
        for key, value in list(vars(module).items()):
            if isinstance(value, float) and ("drop" in key or (key == "p" and "Dropout" in type(module).__name__)):
                setattr(module, key, 0.0)
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outputs.append(trained.read(x)[0])
    if torch.equal(*outputs[:2]) and not torch.equal(*outputs[1:]):
        return Finding(name, "says", "Training draws random numbers, so it was not compared with evaluation.")
    if change := subject.difference(outputs[0], subject.read(x)[0]):
        what = f"Training and evaluation differ by {change:.1e} with dropout at 0"
        return _failure(name, what, "statistics of the batch, as in BatchNorm, or another use of self.training")
    return Finding(name, "ok", "Training and evaluation give the same outputs (dropout at 0).")


@torch.no_grad()
def pieces_are_whole(subject: Subject, cuts: Sequence[int] | None = None, length: int = LENGTH) -> Finding:
    """A text read in pieces that end at the cuts (several random ones if not given) gives the output of the whole."""
    x, draw, half = subject.draw(2, length), random.Random(0), length // 2
    splits = [list(cuts or ())]
    if cuts is None:
        splits = [[half], [length - 1], [1, 2, 4, *range(9, 30), 64]]
        splits += [sorted(draw.sample(range(1, length), 3)) for _ in range(3)]
    whole = subject.read(x)[0]
    for split in splits:
        found = subject.read_pieces(x, split)
        if change := subject.difference(found, whole):
            wrong = [time for time in range(length) if subject.difference(found[:, time], whole[:, time])]
            what = f"In pieces that end at {split[:4]}, {len(wrong)} outputs differ, by up to {change:.1e}"
            return _failure("pieces", what, _why_broken(subject, x, found, wrong, split))
    if x.is_floating_point():
        at_once, apart = (_backward(subject, x, slice(half, None), cut)[1][:, :half].any() for cut in ([], [half]))
        if at_once and not apart:
            return Finding("pieces", "warning", "The state is detached: no gradient goes from one piece to another.")
    return Finding("pieces", "ok", f"{length} tokens in pieces of any length give the outputs of the whole text.")


def _why_broken(subject: Subject, x: Tensor, found: Tensor, wrong: list[int], split: list[int]) -> str:
    cut = max((cut for cut in split if cut <= wrong[0]), default=0)
    end = min((other for other in split if other > cut), default=x.shape[1])
    if not subject.has_state or not cut:
        return "positions, a norm or a padding that depend on the number of tokens in the call"
    if not subject.difference(found[:, cut:end], subject.read(x[:, cut:end])[0]):
        return "forward does not use the state that it is given"
    if wrong[-1] < end - 1:
        return f"the state misses the last tokens, which a convolution or a window reads (tokens from {cut} are wrong)"
    return "the state misses something, or positions begin again in each call"


@torch.no_grad()
def state_size(subject: Subject, lengths: Sequence[int] = (64, 192, 768)) -> Finding:
    """The bytes of one row's state after pieces of these lengths: `numbers` has the smallest, the last, the growth."""
    state, sizes, num_tokens = None, list[int](), 0
    for length in lengths:
        length = min(length, (subject.longest or num_tokens + length) - num_tokens)
        if length:
            state, num_tokens, last = subject.read(subject.draw(1, length), state)[1], num_tokens + length, length
            sizes.append(sum(part.nbytes for part in subject.tensors(state)))
    growth = (sizes[-1] - sizes[-2]) / last if len(sizes) > 1 else 0.0
    numbers = {"smallest": float(min(sizes)), "bytes": float(sizes[-1]), "growth": growth}
    what = "The state" if subject.has_state else "No state: the text, read again for each token,"
    what += f" grows by {growth:,.4g} bytes per token, to" if growth else " is bounded,"
    what += f" {sizes[-1]:,} bytes after {num_tokens:,} tokens"
    held = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in subject.tensors(state)}
    kept = f"; its tensors are views that keep {sum(held.values()):,} bytes" if sum(held.values()) > sizes[-1] else ""
    kinds = {part.dtype for part in subject.tensors(state)} & {torch.bfloat16, torch.float16}
    if kinds and subject.dtype not in kinds:
        return Finding("state", "warning", f"{what}, in {kinds.pop()}: errors add up, so use float32.", numbers)
    limit = "" if (longest := subject.longest or 4096) >= 4096 else f"; it cannot read {2 * longest:,} tokens"
    return Finding("state", "says", f"{what}{kept}{limit}.", numbers)


def finite(subject: Subject) -> Finding:
    """Outputs and gradients are finite for short texts, equal tokens, in bf16, and (else a warning) for any size."""
    x = subject.draw(2, 16)
    cases = {
        "1 token": x[:, :1], "2 tokens": x[:, :2], "ordinary tokens": x, "equal tokens": x[:, :1].expand(-1, 16, -1),
        **{f"tokens of size {scale:g}": scale * x for scale in (1e-3, 1e-2, 1e2, 1e4, 0)},
    }  # fmt: skip
    bad = {case: what for case, given in cases.items() if (what := _not_finite(subject, given))}
    error, exact = 0.0, subject.read(x)[0].detach()
    try:
        with torch.autocast("cpu", torch.bfloat16):
            if what := _not_finite(subject, x):
                bad["ordinary tokens in bf16"] = what
            error = float((subject.read(x)[0].detach() - exact).norm() / exact.norm().clamp(min=1e-30))
        note = f"bf16 differs by {error:.1%}"
    except (RuntimeError, TypeError) as failure:
        error = 0.0 if "not implemented" in str(failure) else 1.0  # by PyTorch, on a CPU
        note = f"{'training in bf16 will fail' if error else 'bf16 was not checked'} ({brief(failure)})"
    if bad:
        what = f"Not finite: {listed([f'{what} for {case}' for case, what in bad.items()][:3])}"
        cause = "a division by a sum, deviation or norm that is 0, or an exponential without its maximum subtracted"
        return _failure("finite", what, cause, "failure" if any("size" not in case for case in bad) else "warning")
    what = f"Outputs and gradients are finite for tokens of size 1e-3 to 1e4; {note}."
    return Finding("finite", "warning" if error > 0.1 else "ok", what, {"bf16": error})


def gradients(subject: Subject, length: int = 6) -> Finding:
    """Every parameter gets a gradient, and gradients are those of finite differences."""
    subject, name = subject.copy(), "gradients"
    trained = {name.split("module.")[-1]: p for name, p in subject.module.named_parameters() if p.requires_grad}
    for parameter in trained.values():  # where one is zero, others may have no gradient
        parameter.data += 0.1 * noise(parameter, seed=3)
    x, half = subject.draw(1, length).requires_grad_(), length // 2
    tensors = {"the input": x, **trained}
    found = _backward(subject, x, cuts=[half])[1:]
    if idle := [key for key, part in zip(tensors, found, strict=True) if not part.any()]:
        what = f"No gradient reaches {listed(idle[:4])}"
        return _failure(name, what, "forward does not use it, or detaches what it gives", "warning")
    if {subject.dtype, subject.rounds_to} != {torch.float64}:
        return Finding(name, "ok", "Gradients reach every parameter; finite differences need float64.")
    for key, tensor in tensors.items():  # gradcheck changes each in place, where the module reads it
        is_precise, read = tensor.dtype in (torch.float64, torch.complex128), lambda *_: subject.read_pieces(x, [half])
        if is_precise and not torch.autograd.gradcheck(read, (tensor,), fast_mode=True, raise_exception=False):
            what = f"The gradient of {key} differs from finite differences"
            return _failure(name, what, "detach, rounding, or a backward pass of your own", "warning")
    return Finding(name, "ok", "Gradients reach every parameter and equal finite differences.")


@torch.enable_grad()
def _backward(subject: Subject, x: Tensor, outputs: slice = slice(None), cuts: Sequence[int] = ()) -> list[Tensor]:
    """Some outputs, and their gradients for x and for the trained parameters, zero where there is none."""
    tensors = [x.detach().clone().requires_grad_(), *(p for p in subject.module.parameters() if p.requires_grad)]
    chosen = subject.read_pieces(tensors[0], cuts)[:, outputs]
    loss = (chosen * noise(chosen, seed=7)).sum() + 0 * tensors[0].sum()
    return [chosen.detach(), *torch.autograd.grad(loss, tensors, allow_unused=True, materialize_grads=True)]


def _not_finite(subject: Subject, x: Tensor) -> str:
    """The outputs or gradients, if they are not finite."""
    is_finite = [bool(part.isfinite().all()) for part in _backward(subject, x)]
    return "" if all(is_finite) else "gradients" if is_finite[0] else "outputs"


def noise(like: Tensor, seed: int) -> Tensor:
    """Normally distributed numbers, which do not depend on the dtype but for rounding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like)


def brief(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:160]


def _failure(name: str, what: str, cause: str, result: Result = "failure") -> Finding:
    return Finding(name, result, f"{what}. Likely cause: {cause}.")
