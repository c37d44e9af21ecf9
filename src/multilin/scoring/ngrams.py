"""Interpolated n-gram models, a baseline for trained models."""

import itertools

import numpy as np
from numpy.typing import NDArray

from multilin.data.packed_text import PackedText
from multilin.data.prepared import TrainText
from multilin.errors import InputError

MAX_ORDER = 5
RECENT = 256  # tokens before a position in which `repetition` looks for its last ones
REPETITION_SHARES = np.linspace(0.0, 0.6, 31)  # of the recent tokens in the mixture, of which the best counts


class NgramModel:
    """An n-gram model with Witten-Bell interpolation.

    With c(h, w) the times token w follows the context h in the training text, N(h) = sum_w c(h, w), and T(h) the number
    of distinct tokens that follow h,

        p(w | h) = (c(h, w) + T(h) p(w | h')) / (N(h) + T(h)),

    where h' is h without its oldest token. The empty context is interpolated with the uniform distribution over the
    vocabulary, and an unseen context has p(w | h'). Start tokens are not predicted, and no context crosses them.

    Source: Chen & Goodman 1999, "An empirical study of smoothing techniques for language modeling", section 2.4.
    """

    def __init__(self, train: TrainText, order: int, most: int | None = None) -> None:
        """Count the n-grams of `train` up to `order`, 1 to 5; memory about 40 bytes per n-gram and order.

        Args:
            train: the text to count in.
            order: 1 to 5.
            most: n-grams to count, evenly spaced in the first shard of the text; None counts all.

        Raises:
            InputError: another order, or a vocabulary too large for it.
        """
        self.order = order
        self.vocab_size, self.tokenizer_hash = train.description.vocab_size, train.description.tokenizer_hash
        if not 1 <= order <= MAX_ORDER:
            raise InputError(f"order: {order} given, but n-gram models are made of order 1 to {MAX_ORDER}")
        if self.vocab_size**order > 2**63:
            raise InputError(f"order: {order} given, but a vocabulary of {self.vocab_size} is too large for that")
        shards = train.shards if most is None else itertools.islice(train.shards, 1)
        ngrams = np.concatenate([text_ngrams(shard, order, most) for shard in shards])
        self._tables = []
        for length in range(1, order + 1):
            keys, counts = np.unique(self._keys(ngrams, length), return_counts=True)
            contexts, first = np.unique(keys // self.vocab_size, return_index=True)
            distinct = np.diff(first, append=len(keys))
            self._tables.append((keys, counts, contexts, np.add.reduceat(counts, first), distinct))

    def probabilities(self, ngrams: NDArray[np.int64]) -> NDArray[np.float64]:
        """(N,) probability of each n-gram's last token after the ones before it; ngrams is (N, order), oldest first."""
        result = np.full(len(ngrams), 1.0 / self.vocab_size)
        for length, (known, counts, contexts, totals, distincts) in enumerate(self._tables, start=1):
            keys = self._keys(ngrams, length)
            count = _look_up(known, counts, keys)
            total, distinct = (_look_up(contexts, values, keys // self.vocab_size) for values in (totals, distincts))
            result = np.where(total > 0, (count + distinct * result) / np.maximum(total + distinct, 1), result)
        return result

    def bits_per_byte(self, validation: PackedText, most: int | None = None) -> float:
        """Bits per byte of the exact validation text under this model.

        Counted as `evaluate` does: -log2 p over all tokens but the start tokens, divided by the text's UTF-8 bytes.
        With `most`, at most so many tokens at even distances are predicted.

        Raises:
            InputError: the validation text is of another tokenizer than the model.
        """
        if self.tokenizer_hash != validation.description.tokenizer_hash:
            raise InputError("n-gram model: the training and validation text were packed with different tokenizers")
        ngrams = text_ngrams(validation, self.order, most)
        predicted: float = validation.num_bytes
        if most is not None:
            predicted = float(validation.token_sizes(ngrams[:, -1]).sum()) * validation.bytes_per_counted
        return float(-np.log2(self.probabilities(ngrams)).sum() / predicted)

    def _keys(self, ngrams: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """The last `length` tokens of each n-gram as one number in base vocab_size."""
        keys = np.zeros(len(ngrams), dtype=np.int64)
        for column in range(self.order - length, self.order):
            keys = keys * self.vocab_size + ngrams[:, column]
        return keys


def text_ngrams(packed: PackedText, order: int, most: int | None = None) -> NDArray[np.int64]:
    """(N, order) the n-grams that end in a text token, oldest token first.

    The start token is repeated before the start of a document, so that no context reaches into another document.
    With `most`, at most so many n-grams at even distances.
    """
    ends, first = _positions(packed, most)
    columns = [packed.tokens[np.maximum(ends - back, first)] for back in range(order - 1, -1, -1)]
    return np.stack(columns, axis=1).astype(np.int64)


def _positions(packed: PackedText, most: int | None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(N,) each: positions of text tokens, at most so many, at even distances, and the starts of their documents."""
    starts, wanted = packed.document_starts, min(packed.num_tokens, most or packed.num_tokens)
    ends = (np.arange(wanted) * (packed.num_tokens / max(wanted, 1))).astype(np.int64)
    first = starts[np.searchsorted(starts, ends, side="right") - 1]
    is_text = ends != first
    return ends[is_text], first[is_text]


def repetition(model: NgramModel, validation: PackedText, most: int) -> float:
    """How much a text repeats what it said just before: the bits of an n-gram model that sees it, over those without.

    With h the last m tokens before a position, m as large as they occur among the `RECENT` before and at most 3,

        r(w) = (times w follows h there) / (times h has a follower there),        p(w) = (1 - s) p_ngram(w) + s r(w)

    h is empty where not even the last token occurs there. s is that of `REPETITION_SHARES` with the fewest bits: one
    without recent tokens is among them, so the result is at most 1.

    Args:
        model: of the training text.
        validation: of the same tokenizer.
        most: tokens that are predicted, at even distances; memory about 10 kB for each.
    """
    ends, first = _positions(validation, most)
    columns = ends[:, None] - np.arange(RECENT + 3, -1, -1)
    tokens = np.where(columns >= first[:, None], validation.tokens[np.maximum(columns, 0)].astype(np.int64), -1)
    last, recent = tokens[:, -1:], tokens[:, 3:-1]
    follows = recent >= 0
    shares = _share(recent == last, follows)
    for back in (1, 2, 3):
        follows &= tokens[:, 3 - back : -1 - back] == tokens[:, -1 - back, None]
        shares = np.where(follows.any(axis=1), _share(recent == last, follows), shares)
    counted = model.probabilities(text_ngrams(validation, model.order, most))
    bits = [-np.log2((1 - share) * counted + share * shares).sum() for share in REPETITION_SHARES]
    return float(min(bits) / bits[0])


def _share(hits: NDArray[np.bool_], among: NDArray[np.bool_]) -> NDArray[np.float64]:
    """(N,) the share of hits in each row, among the entries that count."""
    counts: NDArray[np.float64] = (hits & among).sum(axis=1) / np.maximum(among.sum(axis=1), 1)
    return counts


def _look_up(keys: NDArray[np.int64], values: NDArray[np.int64], wanted: NDArray[np.int64]) -> NDArray[np.int64]:
    """The value of each wanted key, 0 where there is none; `keys` are sorted."""
    if len(keys) == 0:
        return np.zeros(len(wanted), dtype=np.int64)
    places = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[places] == wanted, values[places], 0)
