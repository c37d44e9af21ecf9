"""A score on a text, broken down by position, document, kind of token, and frequency of the token."""

import dataclasses
import itertools
import math
import string
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from multilin.data.packed_text import PackedText
from multilin.data.tokenizers import token_texts
from multilin.training.losses import Evaluation, Scored, summarise

CLASSES = ("word start", "word continuation", "digits", "punctuation", "space", "new line", "other")
FREQUENCIES = (10, 100, 1000)
NUM_EXTREMES = 3
QUANTILES = (0.1, 0.5, 0.9)
FEWEST_BYTES = 100  # that a document needs to be ranked
OPENING_TOKENS = 12


@dataclass(frozen=True)
class Part:
    """A group of tokens: its name, the number of scored tokens, their UTF-8 bytes, and the sum of their losses."""

    name: str
    tokens: int
    bytes: float
    nats: float

    @property
    def loss(self) -> float:
        """The mean loss per token, in nats."""
        return self.nats / self.tokens if self.tokens else math.nan

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of text."""
        return self.nats / math.log(2) / self.bytes if self.bytes else math.nan


@dataclass(frozen=True)
class Breakdown:
    """A score and its parts. In each list of parts, every scored token belongs to exactly one part.

    by_position: grouped by the number of earlier tokens, including the start token, in bins that double in size.
    by_document: one part per document with a scored token, in order; the part's name is the number of the document.
    by_class: grouped by the kind of token, one of `CLASSES`.
    by_frequency: grouped by the token's rank among the tokens of this text, the most frequent first.
    openings: the first words of the best and worst documents, by document number.
    """

    evaluation: Evaluation
    by_position: list[Part]
    by_document: list[Part]
    by_class: list[Part]
    by_frequency: list[Part]
    openings: dict[str, str] = field(default_factory=dict)

    def documents_by_score(self) -> list[Part]:
        """Documents of at least FEWEST_BYTES bytes, best first."""
        long_enough = [part for part in self.by_document if part.bytes >= FEWEST_BYTES]
        return sorted(long_enough, key=lambda part: part.bits_per_byte)


class _Tally:
    """The numbers of tokens and bytes and the sum of losses in nats, for each of several numbered groups."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names, self.sums = names, np.zeros((3, len(names)))

    def add(self, groups: NDArray[np.int64], sizes: NDArray[np.int64], losses: NDArray[np.float64]) -> None:
        for row, weights in enumerate((None, sizes, losses)):
            self.sums[row] += np.bincount(groups, weights, minlength=len(self.names))

    def parts(self, bytes_per_counted: float) -> list[Part]:
        """The groups that have tokens."""
        groups = zip(self.names, *self.sums.tolist(), strict=True)
        return [
            Part(name, int(tokens), sizes * bytes_per_counted, nats) for name, tokens, sizes, nats in groups if tokens
        ]


def break_down(scored: Iterable[Scored], packed: PackedText, tokenizer: PreTrainedTokenizerFast) -> Breakdown:
    """Sum the losses that `read_blocks` or `read_whole` yields, by group of tokens.

    Raises:
        InputError: there is no token to score.
    """
    kinds = TokenKinds(tokenizer, packed.description.vocab_size)
    counts_V = packed.token_counts()
    if packed.is_answer is None:
        counts_V[packed.description.start_token_id] = 0  # begins documents, so it is not scored
    frequency_V = _frequency_classes(counts_V)
    num_bins = math.floor(math.log2(max(packed.num_tokens, 2))) + 1
    edges = [0, *FREQUENCIES]
    total, by_position, by_document, by_class, by_frequency = tallies = [
        _Tally([""]),
        _Tally(["1", *(f"{2**n:,} to {2 ** (n + 1) - 1:,}" for n in range(1, num_bins))]),
        _Tally([str(number) for number in range(packed.num_documents)]),
        _Tally(CLASSES),
        _Tally([*(f"rank {first + 1} to {last}" for first, last in itertools.pairwise(edges)), "rarer"]),
    ]
    for part in scored:
        tokens, before = packed.tokens[part.places].astype(np.int64), packed.tokens[part.places - 1].astype(np.int64)
        sizes = packed.token_sizes(tokens)
        total.add(np.zeros_like(tokens), sizes, part.losses)
        # log2 would round; frexp is exact.
        by_position.add(np.frexp(part.contexts)[1].astype(np.int64) - 1, sizes, part.losses)
        by_document.add(np.searchsorted(packed.document_starts, part.places, side="right") - 1, sizes, part.losses)
        by_class.add(kinds.classes(tokens, before), sizes, part.losses)
        by_frequency.add(frequency_V[tokens], sizes, part.losses)
    whole, positions, documents, classes, frequencies = (tally.parts(packed.bytes_per_counted) for tally in tallies)
    evaluation = summarise(*((whole[0].nats, whole[0].tokens, round(whole[0].bytes)) if whole else (0.0, 0, 0)))
    breakdown = Breakdown(evaluation, positions, documents, classes, frequencies)
    ordered = breakdown.documents_by_score()
    for document in [*ordered[:NUM_EXTREMES], *ordered[-NUM_EXTREMES:]]:
        ids = packed.opening(int(document.name), OPENING_TOKENS)
        breakdown.openings[document.name] = " ".join(tokenizer.decode(ids).split())
    return breakdown


class TokenKinds:
    """Sorts the tokens of a vocabulary into CLASSES, by their text and the text of the token before.

    A token starts a word if it begins with a letter and follows a space or a token that does not end in a letter or
    digit. Parts of characters, special tokens and all other tokens are "other".
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, vocab_size: int) -> None:
        known = tokenizer.backend_tokenizer.get_vocab(with_added_tokens=True).values()
        texts = dict(zip(known, token_texts(tokenizer, list(known)), strict=True))
        special = set(tokenizer.all_special_ids)
        all_texts = ["" if token in special else texts.get(token, "") for token in range(vocab_size)]
        self._kind = np.array([_kind(text) for text in all_texts])
        self._begins_apart = np.array([text[:1].isspace() for text in all_texts])
        self._ends_word = np.array([text[-1:].isalnum() for text in all_texts])

    def classes(self, tokens: NDArray[np.int64], before: NDArray[np.int64]) -> NDArray[np.int64]:
        """The class of each token as an index into CLASSES; the class also depends on the token before."""
        kinds = self._kind[tokens]
        goes_on = self._ends_word[before] & ~self._begins_apart[tokens]
        return np.where((kinds == CLASSES.index("word start")) & goes_on, CLASSES.index("word continuation"), kinds)


def _kind(text: str) -> int:
    inner = text.strip()
    if text and not inner:
        name = "new line" if "\n" in text else "space"
    elif not text or text.startswith("\\x"):
        name = "other"
    elif inner[0].isalpha():
        name = "word start"
    elif inner[0].isdigit():
        name = "digits"
    else:
        is_sign = inner[0] in string.punctuation or unicodedata.category(inner[0]).startswith("P")
        name = "punctuation" if is_sign else "other"
    return CLASSES.index(name)


def _frequency_classes(counts_V: NDArray[np.int64]) -> NDArray[np.int64]:
    ranks = np.empty(len(counts_V), dtype=np.int64)
    ranks[np.argsort(-counts_V, kind="stable")] = np.arange(len(counts_V))
    return np.searchsorted(FREQUENCIES, ranks, side="right")


def as_data(breakdown: Breakdown) -> dict[str, Any]:
    """The score and its parts as plain data; for documents only their number, quantiles, and the best and worst."""
    return dataclasses.asdict(breakdown.evaluation) | {
        "by_position": _data(breakdown.by_position),
        "by_document": _documents(breakdown),
        "by_class": _data(breakdown.by_class),
        "by_frequency": _data(breakdown.by_frequency),
    }


def _documents(breakdown: Breakdown) -> dict[str, Any]:
    ordered = breakdown.documents_by_score()
    data: dict[str, Any] = {
        "number": len(breakdown.by_document),
        "long_enough": len(ordered),
        "fewest_bytes": FEWEST_BYTES,
    }
    if len(ordered) < 2:
        return data
    values = np.quantile([part.bits_per_byte for part in ordered], QUANTILES).tolist()
    data["bits_per_byte_quantiles"] = dict(zip(map(str, QUANTILES), values, strict=True))
    # No document is both among the best and among the worst.
    extremes = {"best": ordered[:NUM_EXTREMES], "worst": ordered[NUM_EXTREMES:][-NUM_EXTREMES:][::-1]}
    for name, parts in extremes.items():
        openings = [{"begins_with": breakdown.openings[part.name]} for part in parts]
        data[name] = [part | opening for part, opening in zip(_data(parts), openings, strict=True)]
    return data


def _data(parts: Sequence[Part]) -> list[dict[str, Any]]:
    return [
        dataclasses.asdict(part) | {"loss": part.loss, "bits_per_byte": part.bits_per_byte if part.bytes else None}
        for part in parts
    ]
