"""The rule that picks a model for a text and so many seconds: the one for which the law expects least.

A large vocabulary has more bytes of text in a token, and a larger output projection, which costs operations. A small
text bounds the choice: no more parameters than bytes of text, no more passes than the law gains from, or than
`MOST_PASSES`, a vocabulary that grows with the square root of the text at most. Where these leave time over, the
run ends earlier.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from multilin.analysis.budget.law import Law
from multilin.analysis.compare.sweep import builtin_sweep, nested
from multilin.data.settings import BYTE_VOCAB_SIZE
from multilin.errors import InputError
from multilin.model.memory import FLOAT_BYTES
from multilin.training.fields import merge

ARCHITECTURE = "tscale"  # that of the lowest bits per byte in docs/compare.md
SHORT_RUN = 4, 256  # texts of a step and the tokens of each, as most runs of the law have them
LONG_RUN = 8, 512  # the same of a run of at least `LONG_TOKENS`
LONG_TOKENS = 4_000_000  # a thousand steps of a long run, which computes more tokens in a second
WARMUP_SHARE, LONGEST_WARMUP = 0.04, 100
MOST_PASSES = 10
BY_HEART = 1.0  # x of the law, from which on a stronger weight decay keeps a model from learning its text by heart
BY_HEART_DECAY = 0.05  # of TScale then, in steps of `SHORT_RUN`
MUCH_WORSE = 1.05  # times the least expected so far, from which on larger models are not looked at
MOST_IN_LAYERS = 0.9  # of the time of a step, whatever was measured
ENTRIES = 3.0  # times the square root of the bytes of a text: the largest vocabulary that it can fill well
NEAR = 1.02  # times the least that is expected with any vocabulary: larger ones were 1 % better at equal time
BYTES_PER_TOKEN = {512: 2.0, 1024: 2.5, 2048: 3.0, 4096: 3.45, 8192: 3.85}
"""Vocabularies, and roughly the bytes of English or Python in a token: only their ratios count."""
SMALLEST_VOCABULARY = min(BYTES_PER_TOKEN)
SIZES = (
    (64, 4), (96, 4), (128, 4), (160, 4), (192, 4), (256, 4), (256, 6), (320, 6), (384, 6), (384, 8), (512, 8), (640, 8)
)  # fmt: skip
"""(hidden_size, num_layers), the smallest first."""


@dataclasses.dataclass(frozen=True)
class Size:
    """Width, depth and vocabulary, which the rule picks."""

    hidden_size: int
    num_layers: int
    vocab_size: int


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A model that may be picked.

    parameters: outside the embeddings and the output projection. flops_per_token: of training.
    memory: bytes that its training takes at least.
    """

    size: Size
    parameters: int
    flops_per_token: float
    memory: float


@dataclasses.dataclass(frozen=True)
class Speed:
    """What a training step takes on a machine, whatever the model: seconds for a layer, and for an operation.

    tokens_per_step: for which it was measured.
    """

    per_layer: float
    per_flop: float
    tokens_per_step: int

    def tokens_per_second(self, one: Candidate) -> float:
        """Training tokens of a candidate."""
        seconds = self.per_layer * one.size.num_layers
        return self.tokens_per_step / (seconds + self.per_flop * one.flops_per_token * self.tokens_per_step)


@dataclasses.dataclass(frozen=True)
class Choice:
    """A candidate, and the tokens to train it on. ratio: see `Law.ratio`."""

    candidate: Candidate
    tokens: int
    ratio: float


def fit_speed(small: tuple[Candidate, float], large: tuple[Candidate, float], tokens_per_step: int) -> Speed:
    """The speed of a machine from two candidates and the seconds of a step of each.

    Where one cannot tell them apart, all of the time counts as that of operations.
    """
    layers = [one.size.num_layers for one, _ in (small, large)]
    flops = [one.flops_per_token * tokens_per_step for one, _ in (small, large)]
    (first, second), per_layer = (small[1], large[1]), 0.0
    if (determinant := layers[0] * flops[1] - layers[1] * flops[0]) > 0:
        per_layer = max(0.0, (first * flops[1] - second * flops[0]) / determinant)
    per_layer = min(per_layer, MOST_IN_LAYERS * second / layers[1])
    return Speed(per_layer, (second - per_layer * layers[1]) / flops[1], tokens_per_step)


def choose_vocabulary(
    candidates: Callable[[int], Iterable[Candidate]], law: Law, *, speed: Speed, seconds: float, train_bytes: int
) -> int:
    """The largest vocabulary with which `choose` finds about the best model; single bytes for a text too small for any.

    Args:
        candidates: those of a vocabulary of so many entries, the smallest first.
        law, speed, seconds, train_bytes: as for `choose`.
    """
    ratios = {}
    for vocab_size, bytes_per_token in BYTES_PER_TOKEN.items():
        if vocab_size <= ENTRIES * math.sqrt(train_bytes):
            tokens = max(1, round(train_bytes / bytes_per_token))
            ratios[vocab_size] = choose(
                candidates(vocab_size), law=law, speed=speed, seconds=seconds, train_tokens=tokens,
                train_bytes=train_bytes,
            ).ratio  # fmt: skip
    near = [vocab_size for vocab_size, ratio in ratios.items() if ratio <= NEAR * min(ratios.values())]
    return max(near, default=BYTE_VOCAB_SIZE)


def with_vocabulary(one: Candidate, vocab_size: int) -> Candidate:
    """The candidate with another output projection: six operations and eight bytes at least for each of its weights."""
    more = one.size.hidden_size * (vocab_size - one.size.vocab_size)
    size = dataclasses.replace(one.size, vocab_size=vocab_size)
    flops, memory = one.flops_per_token + 6 * more, one.memory + 2 * FLOAT_BYTES * more
    return dataclasses.replace(one, size=size, flops_per_token=flops, memory=memory)


def choose(
    candidates: Iterable[Candidate], *, law: Law, speed: Speed, seconds: float, train_tokens: int, train_bytes: int,
    repetition: float = 1.0, memory: float | None = None,
) -> Choice:  # fmt: skip
    """The candidate for which the law expects the fewest bits per byte after so many seconds of training, or fewer.

    Args:
        candidates: at least one, the smallest first; tried in order until one is too large for memory, text or time.
        law: see `multilin.analysis.budget.law`.
        speed: of the machine.
        seconds: of the whole training.
        train_tokens, train_bytes: of the training text.
        repetition: of the text, see `TextMeasure`.
        memory: bytes that there are; None where the system does not tell.

    Raises:
        InputError: the memory suffices for none.
    """
    best: Choice | None = None
    for one in candidates:
        if memory is not None and one.memory > memory:
            if best is None:
                raise InputError(
                    f"--minutes: training the smallest model takes {one.memory / 1e6:,.0f} MB of memory, and "
                    f"{memory / 1e6:,.0f} are left; close other programs"
                )
            break
        passes = min(seconds * speed.tokens_per_second(one) / train_tokens, MOST_PASSES)
        lengths = [float(whole) for whole in range(1, MOST_PASSES) if whole < passes] + [passes]
        ratio, length = min((law.ratio(one.parameters, x * train_bytes, train_bytes, repetition), x) for x in lengths)
        choice = Choice(one, max(1, round(length * train_tokens)), ratio)
        if best is not None and (one.parameters > train_bytes or ratio > MUCH_WORSE * best.ratio):
            break
        if best is None or choice.ratio < best.ratio:
            best = choice
    assert best is not None, "there is no candidate"
    return best


def sizes(vocab_size: int, given: Mapping[str, Any]) -> list[Size]:
    """Every size that may be picked, the smallest first, with the fields that are given as they are."""
    found = {
        Size(given.get("model.hidden_size") or width, given.get("model.num_layers") or depth, vocab_size)
        for width, depth in SIZES
    }
    return sorted(found, key=lambda size: size.num_layers * size.hidden_size**2)


def recipe_values(
    architecture: str, size: Size, steps: float, step: tuple[int, int], by_heart: float = 0.0
) -> dict[str, Any]:
    """The recipe of a run of about so many steps, each of so many texts and tokens: dotted fields to values.

    Options, optimizer and learning rate of the architecture are those of `multilin compare`, which were found alike, in
    steps of `SHORT_RUN`. In others the rate grows with the square root of the tokens, as that of Adam should. TScale's
    weight decay is a stronger one where by_heart, x of the law, is large; it grows likewise, so that the weights decay
    alike over as many tokens.
    """
    sweep = builtin_sweep()
    row = nested(sweep.rows.get(architecture) or {}, f"rows.{architecture}")
    values = merge(merge({"model": {"architecture": architecture}}, nested(sweep.base, "base")), row)
    growth = math.sqrt(math.prod(step) / math.prod(SHORT_RUN))
    values["optimizer"]["learning_rate"] *= growth
    if by_heart >= BY_HEART and architecture == ARCHITECTURE:
        values["optimizer"]["weight_decay"] = BY_HEART_DECAY * growth
    sections = {name: values["model"].get(name, {}) for name in ("options", "config")}
    return {
        "model.architecture": architecture,
        "model.hidden_size": size.hidden_size,
        "model.num_layers": size.num_layers,
        "model.n_positions": step[1],
        **{f"model.{section}.{name}": value for section, part in sections.items() for name, value in part.items()},
        "tokenizer.kind": "byte" if size.vocab_size == BYTE_VOCAB_SIZE else "bpe",
        "tokenizer.vocab_size": None if size.vocab_size == BYTE_VOCAB_SIZE else size.vocab_size,
        **{f"optimizer.{name}": value for name, value in values["optimizer"].items()},
        "schedule.name": "linear",
        "schedule.warmup_steps": round(min(LONGEST_WARMUP, WARMUP_SHARE * steps)),
        "training.batch_size": step[0],
    }
