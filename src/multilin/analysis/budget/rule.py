"""The rule that picks a model for a text and a number of operations: the one for which the law expects least.

A small text bounds it: no more parameters than bytes of text, no more passes than `MOST_PASSES`, a vocabulary whose
entries each stand for `BYTES_PER_ENTRY` bytes of text. Where these leave time over, the run ends earlier.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from multilin.analysis.budget.law import Law
from multilin.analysis.compare.sweep import builtin_sweep, merge, nested
from multilin.data.settings import BYTE_VOCAB_SIZE
from multilin.errors import InputError

ARCHITECTURE = "tscale"  # that of the lowest bits per byte in docs/compare.md
N_POSITIONS, BATCH_SIZE = 256, 4  # blocks of these tokens, in every measured run
WARMUP_SHARE, LONGEST_WARMUP = 0.04, 100
MOST_PASSES = 10
BYTES_PER_ENTRY = 500
SMALLEST_VOCABULARY, LARGEST_VOCABULARY = 512, 8192
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


def vocabulary(train_bytes: int) -> int:
    """The largest power of two whose entries have enough bytes of text each; below the smallest, single bytes."""
    entries = max(train_bytes // BYTES_PER_ENTRY, 1)
    if entries < SMALLEST_VOCABULARY:
        return BYTE_VOCAB_SIZE
    return min(int(2 ** (entries.bit_length() - 1)), LARGEST_VOCABULARY)


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
