"""Interpolated n-gram models, a baseline for trained models."""

import numpy as np
from numpy.typing import NDArray

from multilin.data.packed_text import Description, PackedText
from multilin.data.prepared import MixedText, PreparedText, ShardedText, TrainText
from multilin.errors import InputError

MAX_ORDER = 5
MOST_SHARDS = 64  # `most` n-grams are counted in at most this many shards
COUNTED_NGRAMS, PREDICTED_NGRAMS, FEWEST_PREDICTED = 200_000, 20_000, 300  # for `unlikeness`
SMALL_VOCABULARY = 1000
MUCH_UNLIKE = 1.4  # measured `unlikeness`: 0.9 to 1.25 for texts of one kind, 1.35 to 5 for two kinds


class NgramModel:
    """An n-gram model with Witten-Bell interpolation.

    c(h, w) is the number of times token w follows the context h in the training text, N(h) = sum_w c(h, w), and T(h) is
    the number of distinct tokens that follow h. The probability of w after h is

        p(w | h) = (c(h, w) + T(h) p(w | h')) / (N(h) + T(h)),

    where h' is h without its oldest token. The empty context is interpolated with the uniform distribution over the
    vocabulary, and an unseen context has p(w | h'). Start tokens are not predicted, and no context crosses them.

    Source: Chen & Goodman 1999, "An empirical study of smoothing techniques for language modeling", section 2.4.
    """

    def __init__(self, train: TrainText, order: int, most: int | None = None) -> None:
        """Count the n-grams of `train` up to `order`; this takes about 40 bytes of memory per n-gram and order.

        Args:
            train: the text in which n-grams are counted.
            order: the largest number of tokens in an n-gram, 1 to 5.
            most: the number of n-grams to count, evenly spaced in the text; None counts all.

        Raises:
            InputError: the order is not 1 to 5, or the vocabulary is too large for this order.
        """
        self.order = order
        self.vocab_size, self.tokenizer_hash = train.description.vocab_size, train.description.tokenizer_hash
        if not 1 <= order <= MAX_ORDER:
            raise InputError(f"order: {order} given, but it should be 1 to {MAX_ORDER}")
        if self.vocab_size**order > 2**63:
            raise InputError(f"order: {order} given, but this order is too high for a vocabulary of {self.vocab_size}")
        self._count(train_ngrams(train, order, most))

    @classmethod
    def of(cls, ngrams: NDArray[np.int64], description: Description) -> "NgramModel":
        """A model of these n-grams, (N, order), of a text with this description."""
        model = cls.__new__(cls)
        model.order = ngrams.shape[1]
        model.vocab_size, model.tokenizer_hash = description.vocab_size, description.tokenizer_hash
        model._count(ngrams)
        return model

    def _count(self, ngrams: NDArray[np.int64]) -> None:
        self._tables = []
        for length in range(1, self.order + 1):
            keys, counts = np.unique(self._keys(ngrams, length), return_counts=True)
            contexts, first = np.unique(keys // self.vocab_size, return_index=True)
            distinct = np.diff(first, append=len(keys))
            self._tables.append((keys, counts, contexts, np.add.reduceat(counts, first), distinct))

    def probabilities(self, ngrams: NDArray[np.int64]) -> NDArray[np.float64]:
        """(N,) probability of each n-gram's last token, given its other tokens; ngrams is (N, order), oldest first."""
        result = np.full(len(ngrams), 1.0 / self.vocab_size)
        for length, (known, counts, contexts, totals, distincts) in enumerate(self._tables, start=1):
            keys = self._keys(ngrams, length)
            count = _look_up(known, counts, keys)
            total, distinct = (_look_up(contexts, values, keys // self.vocab_size) for values in (totals, distincts))
            result = np.where(total > 0, (count + distinct * result) / np.maximum(total + distinct, 1), result)
        return result

    def bits_per_byte(self, validation: PackedText, most: int | None = None) -> float:
        """Bits per byte of the exact validation text under this model.

        As in `evaluate`, this is the sum of -log2 p over all tokens but the start tokens, divided by the text's UTF-8
        bytes. If `most` is given, only `most` evenly spaced tokens are predicted.

        Raises:
            InputError: the validation text was packed with another tokenizer.
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
    If `most` is given, the result has at most `most` n-grams, evenly spaced.
    """
    ends, first = _positions(packed, most)
    columns = [packed.tokens[np.maximum(ends - back, first)] for back in range(order - 1, -1, -1)]
    return np.stack(columns, axis=1).astype(np.int64)


def train_ngrams(train: TrainText, order: int, most: int | None = None) -> NDArray[np.int64]:
    """(N, order) the n-grams of a training text, as `text_ngrams` gives them.

    If `most` is given, the result has about `most` n-grams, evenly spaced in at most `MOST_SHARDS` shards; if the text
    is not on this machine, all are from the first shard. Texts of a mixture are counted in proportion to their weights.
    """
    if most is None:
        return np.concatenate([text_ngrams(shard, order) for shard in train.shards])
    if isinstance(train, MixedText):
        shares = [max(1, round(most * weight / sum(train.weights))) for weight in train.weights]
        return np.concatenate(
            [train_ngrams(text, order, share) for text, share in zip(train.texts, shares, strict=True)]
        )
    if isinstance(train, PackedText):
        return text_ngrams(train, order, most)
    count = min(len(train.folders), MOST_SHARDS if train.store.local is not None else 1)
    numbers = np.arange(count) * len(train.folders) // count
    return np.concatenate([text_ngrams(train.shard(int(number)), order, -(-most // count)) for number in numbers])


def unlikeness(text: PreparedText) -> float | None:
    """How much harder the validation text is to predict than text that is held out from the training text.

    The held-out text is every tenth piece of the training text. A bigram model of the other pieces (a trigram model for
    a small vocabulary) predicts both texts. The result is the ratio of bits per byte, about 1 for a validation text
    that is like the training text. The result is None if a text is too short to tell, or is not on this machine.
    """
    texts = text.train.texts if isinstance(text.train, MixedText) else [text.train]
    if any(isinstance(one, ShardedText) and one.store.local is None for one in texts):
        return None
    order = 2 if text.train.description.vocab_size > SMALL_VOCABULARY else 3
    ngrams = train_ngrams(text.train, order, COUNTED_NGRAMS)
    is_held_out = np.arange(len(ngrams)) * 20 // max(len(ngrams), 1) % 10 == 5
    samples = ngrams[is_held_out], text_ngrams(text.validation, order, PREDICTED_NGRAMS)
    if min(map(len, samples)) < FEWEST_PREDICTED:
        return None
    model = NgramModel.of(ngrams[~is_held_out], text.train.description)
    known, new = (
        -np.log2(model.probabilities(sample)).sum() / text.validation.token_sizes(sample[:, -1]).sum()
        for sample in samples
    )
    return float(new / known)


def is_much_unlike(unlikeness: float | None) -> bool:
    """Whether a result of `unlikeness` means that one text is much harder or easier to predict than the other."""
    return unlikeness is not None and not 1 / MUCH_UNLIKE < unlikeness < MUCH_UNLIKE


def _positions(packed: PackedText, most: int | None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The positions of at most `most` evenly spaced text tokens, and of the starts of their documents; (N,) each."""
    starts, wanted = packed.document_starts, min(packed.num_tokens, most or packed.num_tokens)
    ends = (np.arange(wanted) * (packed.num_tokens / max(wanted, 1))).astype(np.int64)
    first = starts[np.searchsorted(starts, ends, side="right") - 1]
    is_text = ends != first
    return ends[is_text], first[is_text]


def _look_up(keys: NDArray[np.int64], values: NDArray[np.int64], wanted: NDArray[np.int64]) -> NDArray[np.int64]:
    """The value of each wanted key, 0 for a missing one; `keys` are sorted."""
    if len(keys) == 0:
        return np.zeros(len(wanted), dtype=np.int64)
    places = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[places] == wanted, values[places], 0)
