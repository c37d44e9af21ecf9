"""Tokenizers are lossless, of the size asked for, and come back the same from disk."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from multilin.data import tokenizers
from multilin.data.encoding import make_encoder
from multilin.data.settings import TokenizerShowArguments
from multilin.data.tokenizer_tools import describe_tokenizer
from multilin.data.tokenizers import (
    load_tokenizer,
    save_tokenizer,
    start_token_id,
    token_byte_lengths,
    token_texts,
    tokenizer_hash,
    train_tokenizer,
    trained_end,
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
    assert len(tokenizer) in (258, 300, 262)


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
    text = "some words " * 20 + "ACGT" * 25_000
    trained = train_tokenizer([text], "bpe", 262)
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


def files(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def cut_and_pad(tokenizer: PreTrainedTokenizerFast) -> None:
    """Leave every setting that changes a text, as programs of others do."""
    tokenizer.truncation_side = tokenizer.padding_side = "left"
    tokenizer(
        ["a b c d e", "x"], truncation=True, padding="max_length", max_length=4, stride=1, pad_to_multiple_of=2
    )  # fmt: skip
    tokenizer.model_max_length, tokenizer.clean_up_tokenization_spaces = 3, True


@pytest.mark.parametrize("reloaded", [False, True])
def test_settings_that_change_a_text_are_neither_read_nor_written(
    tokenizer: PreTrainedTokenizerFast, reloaded: bool, tmp_path: Path
) -> None:
    save_tokenizer(tokenizer, tmp_path / "clean")
    given = load_tokenizer(str(tmp_path / "clean"))
    save_tokenizer(given, tmp_path / "clean")
    expected = files(tmp_path / "clean")
    cut_and_pad(given)
    save_tokenizer(given, tmp_path / "saved")
    assert files(tmp_path / "saved") == expected
    assert given.model_max_length == 3  # what is saved is a copy
    given.save_pretrained(tmp_path / "theirs")
    if reloaded:  # then tokenizer_config.json has the settings too
        AutoTokenizer.from_pretrained(tmp_path / "theirs").save_pretrained(tmp_path / "theirs")
    loaded = load_tokenizer(str(tmp_path / "theirs"))
    assert loaded.decode(loaded(CORPUS[0], truncation=True)["input_ids"]) == CORPUS[0]
    save_tokenizer(loaded, tmp_path / "again")
    assert files(tmp_path / "again") == expected


def chat(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.eos_token = "<|im_end|>"


ADDITIONS = {
    "nothing": lambda tokenizer: None,
    "special tokens": lambda tokenizer: tokenizer.add_special_tokens({"additional_special_tokens": ["<x>", "<y>"]}),
    "words": lambda tokenizer: tokenizer.add_tokens(["zebra", " yak"]),
    "padding": lambda tokenizer: tokenizer.add_special_tokens({"pad_token": "[PAD]"}),
    "padding by a token that is there": lambda tokenizer: tokenizer.add_special_tokens({"pad_token": "!"}),
    "the end of an answer": chat,
    "roles": lambda tokenizer: (chat(tokenizer), setattr(tokenizer, "pad_token", "<|im_end|>")),
}


@pytest.mark.parametrize("addition", ADDITIONS)
def test_a_tokenizer_with_added_tokens_is_known(
    tokenizer: PreTrainedTokenizerFast, addition: str, tmp_path: Path
) -> None:
    save_tokenizer(tokenizer, tmp_path / "old")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "old")
    ADDITIONS[addition](theirs)
    theirs.save_pretrained(tmp_path / "new")
    grown = load_tokenizer(str(tmp_path / "new"))
    assert trained_end(grown, tokenizer_hash(tokenizer)) == "<|endoftext|>"
    assert start_token_id(grown) == start_token_id(tokenizer)
    for text in CORPUS:
        assert grown(text)["input_ids"] == tokenizer(text)["input_ids"]
    smaller = addition != "nothing" and trained_end(tokenizer, tokenizer_hash(grown)) is not None
    assert not smaller  # tokens that were taken away are missed


@pytest.mark.parametrize("grows", [False, True])
def test_other_tokenizers_are_not_taken_for_grown_ones(tokenizer: PreTrainedTokenizerFast, grows: bool) -> None:
    content = tokenizer.backend_tokenizer.to_str()
    swapped = re.sub('"[QZ]"', lambda match: '"Z"' if match[0] == '"Q"' else '"Q"', content)
    assert swapped != content
    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(swapped), eos_token="<|endoftext|>")
    if grows:
        chat(other)
    assert trained_end(other, tokenizer_hash(tokenizer)) is None


def sentencepiece(kind: str) -> Tokenizer:
    """A tokenizer that writes spaces as SentencePiece does, and bytes for what it does not know."""
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    if kind == "normalizer":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind)
    special = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=290, special_tokens=special, show_progress=False)
    backend.train_from_iterator(["salt and rope and tide"] * 9, trainer)
    return backend


def words(kind: str) -> Tokenizer:
    """A tokenizer that drops spaces or capitals."""
    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "salt": 1, "and": 2, "</s>": 3}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]) if kind else None
    return backend


SHOWN = {
    **{kind: sentencepiece(kind) for kind in ("normalizer", "always", "first", "never")},
    **{f"words{kind}": words(kind) for kind in ("", " in lower case")},
    **{kind: train_tokenizer(CORPUS, kind, size).backend_tokenizer for kind, size in SIZES.items()},
}


@pytest.mark.parametrize("kind", SHOWN)
@pytest.mark.parametrize("text", ["salt and rope", "  Salt  and\n\ntide ", "你好 salt 😀é and ﬁ", "\ufffd a", "a", ""])
def test_the_pieces_of_a_text_are_the_text(kind: str, text: str, tmp_path: Path) -> None:
    SHOWN[kind].save(str(tmp_path / "tokenizer.json"))
    pieces = describe_tokenizer(TokenizerShowArguments(str(tmp_path), text=text)).pieces
    assert "".join(pieces) == text
    assert len(pieces) == len(SHOWN[kind].encode(text, add_special_tokens=False).ids)


def test_words_begin_with_their_space(tmp_path: Path) -> None:
    SHOWN["always"].save(str(tmp_path / "tokenizer.json"))
    show = TokenizerShowArguments(str(tmp_path), text="salt and rope你")
    assert describe_tokenizer(show).pieces == ["salt", " and", " rope", "", "", "你"]


def test_an_id_without_a_token_has_no_text() -> None:
    assert token_texts(train_tokenizer([], "byte", None), [2 + ord("a"), 258]) == ["a", ""]


def unspaced(number: int, first: int = 0x4E00) -> str:
    """Text like Chinese: words of nine characters, all different, that are separated by commas."""
    characters = "".join(chr(first + (index * index + index // 7) % 300) for index in range(number))
    return "，".join(characters[place : place + 9] for place in range(0, number, 9))


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_text_of_too_many_words_is_sampled_evenly(
    kind: Literal["bpe", "unigram"], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizers, "TRAINED_BYTES", 12_000)
    texts = [unspaced(400) + "\n"] * 10 + [unspaced(400, 0x4E00 + 50 * part) + "\n" for part in range(90)]
    read: list[str] = []

    def once() -> Iterator[str]:
        for text in texts:
            read.append(text)
            yield text

    with pytest.warns(UserWarning, match=r"the tokenizer is trained on 0\.0 of 0\.1 MB, spread over the text"):
        sampled = train_tokenizer(once(), kind, 600)
    assert read == texts
    sample = texts[::16]
    assert sum(len(text.encode()) for text in sample) < 12_000 < sum(len(text.encode()) for text in texts[::8])
    assert tokenizer_hash(sampled) == tokenizer_hash(train_tokenizer(sample, kind, 600))


def test_what_is_sampled_follows_from_the_different_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long text of few words is not; one of many is, however it is written."""
    plain, expected = CORPUS * 300, train_tokenizer(CORPUS * 300, "bpe", 300)
    monkeypatch.setattr(tokenizers, "TRAINED_BYTES", 3000)
    assert sum(map(len, plain)) > 20_000
    assert tokenizer_hash(train_tokenizer(plain, "bpe", 300)) == tokenizer_hash(expected)
    numbers = [f"{number * 7919 % 10**6:06d}" for number in range(3000)]
    for text in ("\n".join(numbers), ",".join(f"x{number}" for number in numbers), "".join(numbers), unspaced(9000)):
        with pytest.warns(UserWarning, match="too many different words"):
            train_tokenizer([text], "bpe", 262)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_size_that_the_text_does_not_support_shrinks_or_is_refused(kind: Literal["bpe", "unigram"]) -> None:
    with pytest.warns(UserWarning, match=r"none given, and the text supports (\d+) tokens, so the tokenizer has \1"):
        trained = train_tokenizer(CORPUS, kind, None)
    assert 258 < len(trained) < 4096
    assert tokenizer_hash(trained) == tokenizer_hash(train_tokenizer(CORPUS, kind, len(trained)))
    with pytest.raises(InputError, match=f"vocab_size: 5000 given, but the corpus supports {len(trained)} tokens"):
        train_tokenizer(CORPUS, kind, 5000)


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
        ("unigram", 258, "tokenizer.vocab_size: 258 given, but a unigram tokenizer needs more than 258"),
        ("byte", 300, "tokenizer.vocab_size: 300 given, but a byte tokenizer has 258 tokens"),
        ("word", 300, "tokenizer.kind: 'word' given, but it should be byte, bpe or unigram"),
    ],
)
def test_sizes_that_cannot_be_are_refused(kind: str, size: int | None, message: str) -> None:
    with pytest.raises(InputError, match=message):
        train_tokenizer(CORPUS, kind, size)


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
