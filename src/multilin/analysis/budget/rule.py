"""The rule that picks a model for a text and a number of operations: the one for which the law expects least.

A large vocabulary has more bytes of text in a token, and a larger output projection, which costs operations. A small
text bounds the choice: no more parameters than bytes of text, no more passes than `MOST_PASSES`, a vocabulary whose
entries each have `BYTES_PER_ENTRY` bytes of text. Where these leave time over, the run ends earlier.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from multilin.analysis.budget.law import Law
from multilin.analysis.compare.sweep import builtin_sweep
from multilin.analysis.compare.values import merge, nested
from multilin.data.settings import BYTE_VOCAB_SIZE
from multilin.errors import InputError

ARCHITECTURE = "tscale"  # that of the lowest bits per byte in docs/compare.md
N_POSITIONS, BATCH_SIZE = 256, 4  # blocks of these tokens, in all measured runs but one
WARMUP_SHARE, LONGEST_WARMUP = 0.04, 100
MOST_PASSES = 10
BYTES_PER_ENTRY = 500
BYTES_PER_TOKEN = {512: 2.0, 1024: 2.5, 2048: 3.0, 4096: 3.45, 8192: 3.85}
"""Vocabularies, and roughly the bytes of English or Python in a token: only their ratios count."""
SMALLEST_VOCABULARY, LARGEST_VOCABULARY = min(BYTES_PER_TOKEN), max(BYTES_PER_TOKEN)
SIZES = (
    (64, 4), (96, 4), (128, 4), (160, 4), (192, 4), (256, 4), (256, 6), (320, 6), (384, 6), (384, 8), (512, 8), (640, 8)
)  # fmt: skip
"""(hidden_size, num_layers), the smallest first."""


@dataclasses.dataclass(frozen=True)
class Size:
    """What the rule picks."""

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
class Choice:
    """A candidate, and the tokens to train it on. ratio: expected bits per byte in those of the trigram model."""

    candidate: Candidate
    tokens: int
    ratio: float


def choose_vocabulary(candidates: Sequence[Candidate], law: Law, *, flops: float, train_bytes: int) -> int:
    """The vocabulary with which `choose` finds the best model; single bytes for a text that is too small for any.

    Args:
        candidates: of one vocabulary, the smallest first.
        law, flops, train_bytes: as for `choose`.
    """
    ratios = {}
    for vocab_size, bytes_per_token in BYTES_PER_TOKEN.items():
        if vocab_size * BYTES_PER_ENTRY <= train_bytes:
            tokens = max(1, round(train_bytes / bytes_per_token))
            models = (_with_vocabulary(one, vocab_size) for one in candidates)
            ratios[vocab_size] = choose(models, law, flops=flops, train_tokens=tokens, train_bytes=train_bytes).ratio
    return min(ratios, key=lambda vocab_size: ratios[vocab_size], default=BYTE_VOCAB_SIZE)


def _with_vocabulary(one: Candidate, vocab_size: int) -> Candidate:
    """The candidate with another output projection: six operations for each of its weights."""
    more = 6 * one.size.hidden_size * (vocab_size - one.size.vocab_size)
    size = dataclasses.replace(one.size, vocab_size=vocab_size)
    return dataclasses.replace(one, size=size, flops_per_token=one.flops_per_token + more)


def choose(
    candidates: Iterable[Candidate], law: Law, *, flops: float, train_tokens: int, train_bytes: int,
    memory: float | None = None,
) -> Choice:  # fmt: skip
    """The candidate for which the law expects the fewest bits per byte after so many operations.

    Args:
        candidates: at least one, the smallest first; they are looked at until they get worse or too large.
        law: see `multilin.analysis.budget.law`.
        flops: operations of the whole training.
        train_tokens, train_bytes: of the training text.
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
        choice = _trained(one, law, flops, train_tokens, train_bytes)
        if best is not None and (choice.ratio >= best.ratio or one.parameters > train_bytes):
            break
        best = choice
    assert best is not None, "there is no candidate"
    return best


def _trained(one: Candidate, law: Law, flops: float, train_tokens: int, train_bytes: int) -> Choice:
    tokens = max(1, round(min(flops / one.flops_per_token, MOST_PASSES * train_tokens)))
    return Choice(one, tokens, law.ratio(one.parameters, tokens * train_bytes / train_tokens, train_bytes))


def sizes(vocab_size: int, given: Mapping[str, Any]) -> list[Size]:
    """Every size that may be picked, the smallest first, with the fields that are given as they are."""
    found = {
        Size(given.get("model.hidden_size") or width, given.get("model.num_layers") or depth, vocab_size)
        for width, depth in SIZES
    }
    return sorted(found, key=lambda size: size.num_layers * size.hidden_size**2)


def recipe_values(architecture: str, size: Size, steps: float) -> dict[str, Any]:
    """The recipe of a run of about so many steps: dotted fields to values.

    Options, optimizer and learning rate of the architecture are those of `multilin compare`, which were found alike.
    """
    sweep = builtin_sweep()
    row = nested(sweep.rows.get(architecture) or {}, f"rows.{architecture}")
    values = merge(merge({"model": {"architecture": architecture}}, nested(sweep.base, "base")), row)
    sections = {name: values["model"].get(name, {}) for name in ("options", "config")}
    return {
        "model.architecture": architecture,
        "model.hidden_size": size.hidden_size,
        "model.num_layers": size.num_layers,
        "model.n_positions": N_POSITIONS,
        **{f"model.{section}.{name}": value for section, part in sections.items() for name, value in part.items()},
        "tokenizer.kind": "byte" if size.vocab_size == BYTE_VOCAB_SIZE else "bpe",
        "tokenizer.vocab_size": None if size.vocab_size == BYTE_VOCAB_SIZE else size.vocab_size,
        **{f"optimizer.{name}": value for name, value in values["optimizer"].items()},
        "schedule.name": "linear",
        "schedule.warmup_steps": round(min(LONGEST_WARMUP, WARMUP_SHARE * steps)),
        "training.batch_size": BATCH_SIZE,
    }
