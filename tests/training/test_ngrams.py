"""n-gram models against a slow dictionary implementation, and as probabilities."""

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from multilin.data.corpora import Document
from multilin.data.packed_text import PackedText, pack
from multilin.data.prepare import prepare_text
from multilin.data.prepared import PreparedText, open_prepared
from multilin.data.settings import DataRecipe, ShardSettings, TokenizerRecipe
from multilin.data.sharding import prepare_shards
from multilin.data.tokenizers import train_tokenizer
from multilin.errors import InputError
from multilin.training.ngrams import (
    NgramModel,
    is_much_unlike,
    text_ngrams,
    unlikeness,
)

TRAIN = ["the cat sat on the mat\n", "the dog sat", "", "a naïve cat 你好, a cat\n" * 3]
STARTS = 4  # start tokens before a sentence, as many as the longest context needs
VALIDATION = ["the cat sat on a dog 😀", "q", "the mat\n"]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(TRAIN, "bpe", 275)


@pytest.fixture(scope="module")
def train(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> PackedText:
    return pack([Document("", text) for text in TRAIN], tokenizer, tmp_path_factory.mktemp("packed") / "train")


@pytest.fixture(scope="module")
def validation(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> PackedText:
    folder = tmp_path_factory.mktemp("packed") / "validation"
    return pack([Document("", text) for text in VALIDATION], tokenizer, folder)


def slow_probability(sentences: list[list[int]], vocab_size: int, context: tuple[int, ...], token: int) -> float:
    """Witten-Bell as it is written down; a sentence begins with as many start tokens as contexts need."""
    lower = 1 / vocab_size if not context else slow_probability(sentences, vocab_size, context[1:], token)
    if not context:
        followers = Counter(token for sentence in sentences for token in sentence[STARTS:])
    else:
        width = len(context)
        followers = Counter(
            sentence[i]
            for sentence in sentences
            for i in range(STARTS, len(sentence))
            if tuple(sentence[i - width : i]) == context
        )
    distinct, total = len(followers), sum(followers.values())
    return (followers[token] + distinct * lower) / (total + distinct) if total else lower


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_equals_a_dictionary_implementation(
    train: PackedText, validation: PackedText, tokenizer: PreTrainedTokenizerFast, order: int
) -> None:
    sentences = [[*[0] * STARTS, *tokenizer(text)["input_ids"]] for text in TRAIN]
    bits = 0.0
    for text in VALIDATION:
        row = [*[0] * STARTS, *tokenizer(text)["input_ids"]]
        for i in range(STARTS, len(row)):
            context = tuple(row[i - order + 1 : i])
            bits -= math.log2(slow_probability(sentences, len(tokenizer), context, row[i]))
    expected = bits / sum(len(text.encode()) for text in VALIDATION)
    assert NgramModel(train, order).bits_per_byte(validation) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_probabilities_sum_to_one_after_seen_and_unseen_contexts(
    train: PackedText, validation: PackedText, order: int
) -> None:
    model = NgramModel(train, order)
    contexts = np.unique(text_ngrams(validation, order)[:, :-1], axis=0)
    for context in contexts:
        everything = np.arange(model.vocab_size)
        ngrams = np.concatenate([np.tile(context, (len(everything), 1)), everything[:, None]], axis=1)
        probabilities = model.probabilities(ngrams)
        assert probabilities.min() > 0
        assert probabilities.sum() == pytest.approx(1, abs=1e-12)


def test_no_context_reaches_into_another_document(train: PackedText, tokenizer: PreTrainedTokenizerFast) -> None:
    ngrams = text_ngrams(train, 3)
    first, second = tokenizer(TRAIN[1])["input_ids"][:2]
    place = len(tokenizer(TRAIN[0])["input_ids"])
    assert ngrams[place : place + 2].tolist() == [[0, 0, first], [0, first, second]]
    assert len(ngrams) == train.num_tokens - train.num_documents


def test_longer_contexts_help_on_the_text_itself(train: PackedText) -> None:
    unigram, bigram, trigram = (NgramModel(train, order).bits_per_byte(train) for order in (1, 2, 3))
    assert unigram > bigram > trigram


def test_as_many_ngrams_are_counted_as_asked_for(train: PackedText) -> None:
    every = text_ngrams(train, 2).tolist()
    assert len(every) == train.num_tokens - train.num_documents
    for most in range(1, train.num_tokens + 5):
        some = text_ngrams(train, 2, most).tolist()
        assert most - train.num_documents <= len(some) <= most or some == every
        assert all(ngram in every for ngram in some)


def test_what_cannot_be_counted_is_refused(train: PackedText, tmp_path: Path) -> None:
    other = pack([Document("", "text")], train_tokenizer([], "byte", None), tmp_path / "other")
    with pytest.raises(InputError, match="packed with different tokenizers"):
        NgramModel(train, 2).bits_per_byte(other)
    with pytest.raises(InputError, match="order: 6 given"):
        NgramModel(train, 6).bits_per_byte(train)


def prose(number: int, seed: int = 0) -> str:
    """Sentences of English, each word drawn after the one before."""
    after = {"the": ["cat", "dog", "old man", "sea"], "cat": ["sat", "ran"], "dog": ["ran", "ate"], "sea": ["was calm"]}
    draw, words = np.random.default_rng(seed), ["the"]
    for _ in range(number):
        words.append(str(draw.choice(after.get(words[-1], ["the", "and the", "on the", "because the", ", but the"]))))
    return " ".join(words)


def code(number: int, seed: int = 0) -> str:
    """Lines of C."""
    draw = np.random.default_rng(seed)
    return "".join(f"#define X_{n % 97} ((int) {n} << {draw.integers(9)}); /* {n:x} */\n" for n in range(number))


def prepared(tmp_path: Path, texts: dict[str, str], **data: str) -> PreparedText:
    (tmp_path / "texts").mkdir()
    for name, text in texts.items():
        (tmp_path / "texts" / f"{name}.txt").write_text(text)
    recipe, tokenizer = DataRecipe(source=str(tmp_path / "texts"), **data), TokenizerRecipe("byte")
    return prepare_text(recipe, tokenizer, cache_folder=tmp_path / "cache")


def test_the_split_of_unequal_kinds_is_like_the_text(tmp_path: Path) -> None:
    text = prepared(tmp_path, {"novel": prose(30_000)} | {str(seed): code(50, seed) for seed in range(4)})
    ratio = unlikeness(text)
    assert ratio is not None
    assert 0.8 < ratio < 1.25
    assert not is_much_unlike(ratio)


@pytest.mark.parametrize("is_other", [True, False])
def test_another_kind_of_validation_text_is_noticed(tmp_path: Path, is_other: bool) -> None:
    (tmp_path / "valid.txt").write_text(code(300) if is_other else prose(3000, seed=1))
    text = prepared(tmp_path, {"novel": prose(30_000)}, validation=str(tmp_path / "valid.txt"))
    assert is_much_unlike(unlikeness(text)) == is_other
    assert unlikeness(prepared_from(tmp_path, "x" * 99)) is None


def prepared_from(tmp_path: Path, text: str) -> PreparedText:
    (tmp_path / "short.txt").write_text(text)
    return prepare_text(DataRecipe(source=str(tmp_path / "short.txt")), TokenizerRecipe("byte"), cache_folder=tmp_path)


def test_shards_sorted_by_kind_are_all_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multilin.data.sharding.SHARD_BYTES", 30_000)
    (tmp_path / "texts").mkdir()
    for name, text in {"0": prose(30_000), "1": code(3000), "2": prose(3000, 2)}.items():
        (tmp_path / "texts" / f"{name}.txt").write_text(text)
    monkeypatch.setattr("multilin.data.corpora.PART_BYTES", 1)
    prepare_shards(ShardSettings(str(tmp_path / "texts"), str(tmp_path / "out"), kind="byte", validation_fraction=0.05))
    text = open_prepared("data.source", str(tmp_path / "out"))
    assert len(list(text.train.shards)) == 3
    assert not is_much_unlike(unlikeness(text))
