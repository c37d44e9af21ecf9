"""Layers with one fault each, and the check that must name it, with words of its sentence."""

import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, dropout, pad, softmax

FAULTS: dict[type[nn.Module], tuple[str, str, str]] = {}
"""Class to (check, result, words)."""


def named_by(check: str, words: str, result: str = "failure"):
    def add(fault: type[nn.Module]) -> type[nn.Module]:
        FAULTS[fault] = check, result, words
        return fault

    return add


class Ema(nn.Module):
    """Right by itself; faults change a part of it."""

    def __init__(self, hidden_size: int, decay: float = 0.9) -> None:
        super().__init__()
        self.value = nn.Linear(hidden_size, hidden_size)
        self.gate = nn.Parameter(torch.full((hidden_size,), decay).logit())

    def forward(self, x, state=None):
        decay, outputs = torch.sigmoid(self.gate), []
        average = torch.zeros_like(x[:, 0]) if state is None else state
        for value in self.value(x).unbind(1):
            average = self.step(decay, average, value)
            outputs.append(average)
        return torch.stack(outputs, 1), average

    def step(self, decay: Tensor, average: Tensor, value: Tensor) -> Tensor:
        return decay * average + (1 - decay) * value


class Pointwise(nn.Module):
    """A running mean without a state, to which faults add."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.value = nn.Linear(hidden_size, hidden_size)

    def forward(self, x):
        return self.value(self.mean(x) + x)

    def mean(self, x: Tensor) -> Tensor:
        return x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None].to(x)


@named_by("causal", "reads 1 ahead, as do 1 of 35 .*that is wrong by 1")
class LooksAhead(Pointwise):
    def forward(self, x):
        return super().forward(x) + pad(x[:, 1:], (0, 0, 0, 1))


@named_by("causal", "wrong by 3")
class LooksFarAhead(Pointwise):
    def forward(self, x):
        return super().forward(x) + pad(x[:, 3:], (0, 0, 0, 3))


@named_by("causal", "wrong by 1")
class CentredConvolution(Pointwise):
    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size)
        self.convolution = nn.Conv1d(hidden_size, hidden_size, 3, padding=1)

    def forward(self, x):
        return super().forward(x) + self.convolution(x.mT).mT


@named_by("causal", "mean, norm, softmax or sum without a mask")
class MeanOverTime(Pointwise):
    def forward(self, x):
        return super().forward(x) + x.mean(1, keepdim=True)


@named_by("causal", "mean, norm, softmax or sum without a mask")
class WeakLeak(Pointwise):
    def forward(self, x):
        return super().forward(x) + 1e-7 * x.mean(1, keepdim=True)


@named_by("causal", "reads 1 ahead")
class WeakLookAhead(Pointwise):
    def forward(self, x):
        return super().forward(x) + 1e-7 * pad(x[:, 1:], (0, 0, 0, 1))


@named_by("causal", "mean, norm, softmax or sum without a mask")
class NormOverTime(Pointwise):
    def forward(self, x):
        return super().forward(x / x.norm(dim=1, keepdim=True).clamp(min=1e-6))


@named_by("causal", "mean, norm, softmax or sum without a mask")
class GroupNormOverTime(Pointwise):
    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size)
        self.norm = nn.GroupNorm(4, hidden_size)

    def forward(self, x):
        return super().forward(self.norm(x.mT).mT)


@named_by("causal", "mean, norm, softmax or sum without a mask")
class SoftmaxOverTime(Pointwise):
    def forward(self, x):
        return super().forward(x) + (softmax(x, dim=1) * x).cumsum(1)


@named_by("causal", "mean, norm, softmax or sum without a mask")
class UnmaskedAttention(Pointwise):
    def forward(self, x):
        return super().forward(nn.functional.scaled_dot_product_attention(x, x, x))


@named_by("causal", "to the size 1e.03: it reads.*a maximum or another scale over all tokens")
class MaximumOfTheCall(Pointwise):
    """Exact arithmetic would be causal: only an extreme token makes the weights of all others 0."""

    def mean(self, x: Tensor) -> Tensor:
        weights = (x - x.amax(1, keepdim=True)).exp()
        return (weights * x).cumsum(1) / weights.cumsum(1)


@named_by("causal", "to the size 1e.08")
class ClampedByTheLargest(Pointwise):
    def forward(self, x):
        return super().forward(x) / (x.abs().amax(1, keepdim=True) / 1e5).clamp(min=1)


@named_by("causal", "chunk or mask that is wrong by 3")
class ChunkSum(Pointwise):
    """Each chunk of 16 reads the whole chunk."""

    def forward(self, x):
        chunks = pad(x, (0, 0, 0, -x.shape[1] % 16)).unflatten(1, (-1, 16))
        return super().forward(x) + chunks.sum(2, keepdim=True).expand_as(chunks).flatten(1, 2)[:, : x.shape[1]]


@named_by("causal", "gradient of .* for later tokens")
class GradientLooksAhead(Pointwise):
    def forward(self, x):
        later = pad(x[:, 1:], (0, 0, 0, 1))
        return super().forward(x) + (later - later.detach())


@named_by("rows", "a mean or norm over the batch")
class MeanOverTheBatch(Pointwise):
    def forward(self, x):
        return super().forward(x) + x.mean(0, keepdim=True)


@named_by("rows", "Row 1 changes by .* when row 0 does")
class SharedState(Ema):
    """All rows go on from the first row."""

    def forward(self, x, state=None):
        return super().forward(x, None if state is None else state[:1].expand_as(state))


@named_by("rows", "the number of rows")
class DividesByTheBatch(Pointwise):
    def forward(self, x):
        return super().forward(x) / len(x)


@named_by("rows", "buffer that keeps rows|buffer that rows share|first axis")
class BufferOfRows(Ema):
    """What follows a first call goes on from a buffer of all rows and not from the given state."""

    def forward(self, x, state=None):
        kept = getattr(self, "kept", None)
        use = state is not None and kept is not None
        output, state = super().forward(x, (kept if len(kept) == len(x) else kept[: len(x)]) if use else None)
        self.kept = state.detach()
        return output, state


@named_by("deterministic", "dropout or noise that is on in evaluation")
class DropoutInEvaluation(Pointwise):
    def forward(self, x):
        return dropout(super().forward(x), 0.1)


@named_by("deterministic", "dropout or noise")
class NoiseInEvaluation(Pointwise):
    def forward(self, x):
        return super().forward(x + 1e-3 * torch.randn_like(x))


@named_by("deterministic", "a buffer that one call leaves to another")
class CountsCalls(Pointwise):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * (1 + 0.01 * self.calls)


@named_by("deterministic", "changes the state in place")
class StateChangedInPlace(Ema):
    def forward(self, x, state=None):
        output, new = super().forward(x, state)
        return output, new if state is None else state.copy_(new.detach())


@named_by("train = eval", "BatchNorm")
class BatchNorm(Pointwise):
    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size)
        self.norm = nn.BatchNorm1d(hidden_size)

    def forward(self, x):
        return self.norm(super().forward(x).mT).mT


@named_by("train = eval", "self.training")
class ScaledInTraining(Pointwise):
    def forward(self, x):
        return super().forward(x) * (2 if self.training else 1)


class Convolution(nn.Module):
    """Four taps; the state is the last three inputs."""

    kept = 3

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.taps = nn.Parameter(torch.randn(hidden_size, 1, 4) / 2)

    def forward(self, x, state=None):
        before = torch.zeros_like(x[:, :1]).expand(-1, 3, -1) if state is None else state
        x = torch.cat([before[:, -self.kept :], x], 1) if self.kept else x
        padded = pad(x, (0, 0, 3 - self.kept, 0))
        return conv1d(padded.mT, self.taps, groups=len(self.taps)).mT, padded[:, -3:]


@named_by("pieces", "misses the last tokens, which a convolution")
class MissesTheTail(Convolution):
    kept = 2


@named_by("pieces", "does not use the state")
class IgnoresTheState(Ema):
    def forward(self, x, state=None):
        return super().forward(x)


@named_by("pieces", "positions begin again|misses something")
class PositionsBeginAgain(Ema):
    def forward(self, x, state=None):
        return super().forward(x + torch.arange(x.shape[1])[:, None].to(x).sin(), state)


@named_by("pieces", "misses|does not use")
class StateOneTokenEarly(Ema):
    def forward(self, x, state=None):
        output, _ = super().forward(x, state)
        return output, output[:, max(x.shape[1] - 2, 0)]


@named_by("pieces", "number of tokens in the call")
class DividesByTheLength(Pointwise):
    def forward(self, x):
        return super().forward(x) / x.shape[1]


@named_by("pieces", "number of tokens in the call")
class RelativePositions(Pointwise):
    def forward(self, x):
        return super().forward(x + torch.linspace(0, 1, x.shape[1])[:, None].to(x))


@named_by("state", "in torch.bfloat16: errors add up", "warning")
class RoundedState(Ema):
    """Kept in bf16."""

    def forward(self, x, state=None):
        output, new = super().forward(x, None if state is None else state.to(x.dtype))
        return output, new.bfloat16()


@named_by("pieces", "The state is detached", "warning")
class DetachedState(Ema):
    def forward(self, x, state=None):
        output, new = super().forward(x, state)
        return output, new.detach()


@named_by("pieces", "next output|misses")
class FirstPieceOnly(Ema):
    """The state of the first call is handed on forever."""

    def forward(self, x, state=None):
        output, new = super().forward(x, state)
        return output, new if state is None else state


@named_by("runs", "first axis is the batch")
class WrongBatchAxis(nn.Module):
    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.gru = nn.GRU(hidden_size, hidden_size, batch_first=True)

    def forward(self, x, state=None):
        return self.gru(x, state)


@named_by("runs", "the output is")
class WrongShape(Pointwise):
    def forward(self, x):
        return super().forward(x)[..., :-1]


@named_by("runs", r"must return \(output, new state\)")
class NoStateReturned(Ema):
    def forward(self, x, state=None):
        return super().forward(x, state)[0]


@named_by("state", "grows by 128 bytes per token", "says")
class GrowingState(Ema):
    def forward(self, x, state=None):
        output, new = super().forward(x, None if state is None else state[0])
        return output, (new, x if state is None else torch.cat([state[1], x], 1))


@named_by("state", "views that keep", "says")
class StateIsAView(Ema):
    def forward(self, x, state=None):
        output, _ = super().forward(x, state)
        return output, output[:, -1]


@named_by("cost", "work is quadratic", "says")
class QuadraticMean(Pointwise):
    def mean(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1]).tril().to(x)
        return mask / mask.sum(1, keepdim=True) @ x


@named_by("cost", "work is quadratic", "says")
class ReadsAgainAtEachToken(Pointwise):
    def mean(self, x: Tensor) -> Tensor:
        return torch.stack([x[:, : end + 1].mean(1) for end in range(x.shape[1])], 1)


@named_by("cost", "linear, but backward quadratic", "says")
class IndexedLoop(Pointwise):
    def mean(self, x: Tensor) -> Tensor:
        total, means = torch.zeros_like(x[:, 0]), []
        for time in range(x.shape[1]):
            total = total + x[:, time]
            means.append(total / (time + 1))
        return torch.stack(means, 1)


@named_by("finite", "outputs for 1 token.*deviation")
class DeviationOfOneToken(Pointwise):
    def mean(self, x: Tensor) -> Tensor:
        return (
            torch.stack([x[:, : end + 1].std(1) for end in range(x.shape[1])], 1) if x.shape[1] > 1 else x.std(1, True)
        )


@named_by("finite", "equal tokens")
class NormOfDifferences(Pointwise):
    def mean(self, x: Tensor) -> Tensor:
        return x / (x - pad(x[:, :-1], (0, 0, 1, 0))).norm(dim=-1, keepdim=True)


@named_by("finite", "ordinary tokens in bf16")
class OverflowsInBf16(Pointwise):
    """A product that autocast rounds: what is left of 1 is 0."""

    def forward(self, x):
        one = torch.nn.functional.linear(torch.ones_like(x), torch.eye(x.shape[-1]).to(x) * (1 + 1e-3))
        return super().forward(x) / (one - 1)


@named_by("finite", "tokens of size 1(e.04|0000)", "warning")
class ExponentialWithoutMaximum(Pointwise):
    def mean(self, x: Tensor) -> Tensor:
        return (x.exp() * x).cumsum(1) / x.exp().cumsum(1)


@named_by("finite", "training in bf16 will fail", "warning")
class FailsInBf16(Pointwise):
    def forward(self, x):
        return torch.lerp(x, super().forward(x), 0.5)


@named_by("gradients", "No gradient reaches unused", "warning")
class UnusedParameter(Pointwise):
    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size)
        self.unused = nn.Parameter(torch.zeros(hidden_size))


@named_by("gradients", "No gradient reaches gate", "warning")
class DetachedParameter(Ema):
    def step(self, decay: Tensor, average: Tensor, value: Tensor) -> Tensor:
        return super().step(decay.detach(), average, value)


@named_by("gradients", "differs from finite differences", "warning")
class DetachedLoop(Ema):
    def step(self, decay: Tensor, average: Tensor, value: Tensor) -> Tensor:
        return super().step(decay, average.detach(), value)


class _HalfGradient(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        return gradient / 2


@named_by("gradients", "a backward pass of your own", "warning")
class WrongBackward(Pointwise):
    def forward(self, x):
        return _HalfGradient.apply(super().forward(x))


@named_by("gradients", "No gradient reaches the input", "warning")
class NoGradient(Pointwise):
    def forward(self, x):
        with torch.no_grad():
            return super().forward(x)


@named_by("learns", "does not learn 64 tokens by heart or to copy", "warning")
class ReadsOneTokenOnly(Pointwise):
    def mean(self, x: Tensor) -> Tensor:
        return x


@named_by("learns", "to copy the token before", "warning")
class Vanishes(Ema):
    """The module's share of the sum is too small to be read."""

    def forward(self, x, state=None):
        output, state = super().forward(x, state)
        return 1e-6 * output, state


@named_by("exports", "refuses a state that grows", "says")
class CannotBeExported(GrowingState):
    pass


@named_by("compiles", "will not work", "says")
class CannotBeCompiled(Ema):
    def step(self, decay: Tensor, average: Tensor, value: Tensor) -> Tensor:
        return super().step(decay, average, value) if float(value.sum()) > -1e9 else value


@named_by("packs", "Despite `starts`, texts in a row differ by", "warning")
class IgnoresStarts(Ema):
    def forward(self, x, state=None, starts=None):
        return super().forward(x, state)
