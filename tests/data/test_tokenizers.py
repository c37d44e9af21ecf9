"""Tokenizers are lossless, of the size asked for, and come back the same from disk."""

import re
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from multilin.data import tokenizers
from multilin.data.encoding import make_encoder
from multilin.data.tokenizers import (
    load_tokenizer,
    start_token_id,
    token_byte_lengths,
    tokenizer_hash,
    train_tokenizer,
    whole_characters,
)
from multilin.errors import InputError

CORPUS = [
    "The cat sat on the mat; the cats' mats weren't flat.\n\nEin naïver Satz, 你好 你好.\n" * 3,
    "import numpy as np\n",
]
SIZES = {"byte": None, "bpe": 300, "unigram": 262}
HARD = "<|endoftext|> a  b\t\n\n  c\x1c \x1d!\x1e\n \xa0\u2003x\x85 don't we'll 12 ½ 😀 é e\u0301 \x00 <|pad|> "
TEXTS = st.text(st.sampled_from("ab1!' \n\r\t\x0b\x1c\x1f\x85\xa0\u2003\u200b.é你😀<|>") | st.characters(codec="utf-8"))


@pytest.fixture(scope="module", params=SIZES)
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return train_tokenizer(iter(CORPUS), request.param, SIZES[request.param])


def encode_whole(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.encode_special_tokens = True
    return backend.encode(text, add_special_tokens=False).ids


def test_special_tokens_have_their_ids_and_roles(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|pad|>"]) == [0, 1]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 0, 1)
    assert start_token_id(tokenizer) == 0


def test_the_vocabulary_has_the_size_asked_for() -> None:
    for kind, size in SIZES.items():
        assert len(train_tokenizer(CORPUS, kind, size)) == (size or 258)


def test_byte_ids_are_the_bytes() -> None:
    tokenizer = train_tokenizer([], "byte", 258)
    assert tokenizer("é\n")["input_ids"] == [2 + byte for byte in "é\n".encode()]


@settings(max_examples=60, deadline=None)
@given(text=TEXTS)
def test_text_comes_back_exactly(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    for exact in (text, HARD):
        ids, counts = make_encoder(tokenizer).encode([exact])
        assert counts.tolist() == [len(ids)]
        assert tokenizer.decode(ids.tolist()) == exact


@settings(max_examples=100, deadline=None)
@given(texts=st.lists(TEXTS, max_size=3))
def test_fast_encoding_equals_encoding_each_text_whole(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> None:
    texts = [*texts, HARD, *texts]
    ids, counts = make_encoder(tokenizer).encode(texts)
    expected = [encode_whole(tokenizer, text) for text in texts]
    assert counts.tolist() == [len(row) for row in expected]
    assert ids.tolist() == [index for row in expected for index in row]


@settings(max_examples=60, deadline=None)
@given(text=TEXTS)
def test_a_text_cut_into_pieces_has_the_same_ids(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    text += HARD + text
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("multilin.data.encoding.PIECE_CHARACTERS", 5)
        encoder = make_encoder(tokenizer)
        pieces = list(encoder.pieces(text))
    assert len(pieces) > 2
    assert "".join(pieces) == text
    assert encoder.encode(pieces)[0].tolist() == encode_whole(tokenizer, text)


def test_a_full_memory_of_words_is_emptied_without_a_trace(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multilin.data.encoding.WORDS_KEPT", 3)
    encoder = make_encoder(tokenizer)
    for text in [*CORPUS, HARD, *CORPUS]:
        assert encoder.encode([text])[0].tolist() == encode_whole(tokenizer, text)


@settings(max_examples=60, deadline=None)
@given(text=TEXTS)
def test_byte_lengths_add_up_to_the_text_also_where_tokens_split_characters(
    tokenizer: PreTrainedTokenizerFast, text: str
) -> None:
    lengths = token_byte_lengths(tokenizer)
    for counted in (text, HARD):
        assert sum(lengths[index] for index in encode_whole(tokenizer, counted)) == len(counted.encode())
    assert lengths[:2] == [0, 0]


@given(text=TEXTS, cut=st.integers(0, 3))
def test_characters_are_put_together_from_their_tokens(tokenizer: PreTrainedTokenizerFast, text: str, cut: int) -> None:
    ids = encode_whole(tokenizer, text)
    runs = whole_characters(tokenizer, ids)
    assert sum(num_tokens for num_tokens, _ in runs) == len(ids)
    assert "".join(part for _, part in runs) == text
    kept = max(len(ids) - cut, 0)  # perhaps in the middle of a character
    cut_runs = whole_characters(tokenizer, ids[:kept])
    assert sum(num_tokens for num_tokens, _ in cut_runs) == kept
    assert cut_runs[:-1] == runs[: max(len(cut_runs) - 1, 0)]


def test_a_long_text_trains_the_tokenizer_that_it_would_train_in_one_piece() -> None:
    text = "".join(f"{line} {number}\n\n  {HARD}" for number in range(900) for line in CORPUS)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>", "<|pad|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([text], trainer)
    assert len(text) > 2**17
    assert train_tokenizer([text], "bpe", 400).get_vocab() == backend.get_vocab()


def test_a_long_word_is_cut_for_training_alone() -> None:
    text = "x" * 2500 + " some words " + "y" * 1001
    assert [len(part) for part in tokenizers._short_words(text)] == [1000, 1000, 1512, 1]
    assert "".join(tokenizers._short_words(text)) == text
    assert list(tokenizers._short_words("few words")) == ["few words"]
    trained = train_tokenizer(["some words " * 20 + "ACGT" * 25_000], "bpe", 262)
    assert trained.decode(trained(text).input_ids) == text


def test_training_is_reproducible(tokenizer: PreTrainedTokenizerFast) -> None:
    kind = {258: "byte", 300: "bpe", 262: "unigram"}[len(tokenizer)]
    assert tokenizer_hash(train_tokenizer(CORPUS, kind, len(tokenizer))) == tokenizer_hash(tokenizer)


def test_a_tokenizer_comes_back_from_folder_and_file(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path / "run")
    tokenizer(["a", "a b c"], padding=True)  # leaves its padding in the tokenizer
    for path in (tmp_path / "run", tmp_path / "run" / "tokenizer.json"):
        loaded = load_tokenizer(str(path))
        assert tokenizer_hash(loaded) == tokenizer_hash(tokenizer)
        assert (loaded.eos_token_id, loaded.pad_token_id) == (0, 1)
        assert loaded.decode(loaded(CORPUS[0])["input_ids"]) == CORPUS[0]


def test_of_several_chat_templates_the_default_is_kept(tmp_path: Path) -> None:
    tokenizer = train_tokenizer([], "byte", None)
    tokenizer.chat_template = {"default": "plain", "tool_use": "with tools"}
    tokenizer.save_pretrained(tmp_path / "several")
    loaded = load_tokenizer(str(tmp_path / "several"))
    assert loaded.chat_template == "plain"
    loaded.save_pretrained(tmp_path / "one")
    assert all(path.is_file() for path in (tmp_path / "one").iterdir())  # the folder of a run has no folder for others


def test_padding_falls_back_to_the_end_of_text(tmp_path: Path) -> None:
    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "cat": 1, "</s>": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(str(tmp_path))
    assert (loaded.eos_token, loaded.pad_token) == ("</s>", "</s>")
    assert make_encoder(loaded).encode(["cat dog", "cat"])[0].tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    ("kind", "size", "message"),
    [
        ("bpe", 200, "tokenizer.vocab_size: 200 given, but a bpe tokenizer needs more than 258"),
        ("unigram", None, "tokenizer.vocab_size: None given, but a unigram tokenizer needs more than 258"),
        ("byte", 300, "tokenizer.vocab_size: 300 given, but a byte tokenizer has 258 tokens"),
        ("word", 300, "tokenizer.kind: 'word' given, but it should be byte, bpe or unigram"),
    ],
)
def test_sizes_that_cannot_be_are_refused(kind: str, size: int | None, message: str) -> None:
    with pytest.raises(InputError, match=message):
        train_tokenizer(CORPUS, kind, size)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_the_number_of_tokens_a_corpus_is_said_to_support_is_supported(kind: Literal["bpe", "unigram"]) -> None:
    with pytest.raises(InputError) as error:
        train_tokenizer(CORPUS, kind, 5000)
    supported = int(re.findall(r"vocab_size: 5000 given, but the corpus supports (\d+) tokens", str(error.value))[0])
    assert len(train_tokenizer(CORPUS, kind, supported)) == supported


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no tokenizer.json"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(InputError, match=r"missing.json' does not exist"):
        load_tokenizer(str(tmp_path / "missing.json"))
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", ')
    with pytest.raises(InputError, match=r"is not a tokenizer.json"):
        load_tokenizer(str(tmp_path))
    Tokenizer(models.WordLevel({"cat": 1}, unk_token="cat")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InputError, match="none of the end-of-text tokens"):
        load_tokenizer(str(tmp_path))


def test_the_hub_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object, **__: object) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", offline)
    with pytest.raises(
        InputError, match=r"'owner/name' is neither .* nor a tokenizer on the hub \(ConnectionError: no network\)"
    ):
        load_tokenizer("owner/name")
    with pytest.raises(InputError, match=r"'owner/name-0\.5B' is neither"):
        load_tokenizer("owner/name-0.5B")
    for path in ("./owner/name", "owner/tokenizer.json", "a/b/c", "words.bin"):
        with pytest.raises(InputError, match="does not exist"):
            load_tokenizer(path)
