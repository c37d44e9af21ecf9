"""Streams of text from tokens."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from multilin import InputError
from multilin.data.added_text import plain_tokenizer
from multilin.data.encoding import make_encoder
from multilin.data.tokenizers import train_tokenizer
from multilin.inference.generate_run import text_codec
from multilin.inference.text import TextCodec, TextStream
from tests.tokenizer_kinds import KINDS, random_ids, tokenizer


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return text_codec(train_tokenizer([""], "byte", None))


@given(st.text("abü", max_size=30), st.lists(st.text("abü", min_size=1, max_size=6), max_size=3))
def test_a_stream_ends_before_the_first_stop_string(codec: TextCodec, text: str, stop: list[str]) -> None:
    """Nothing is passed on too early, nothing is lost, and what is whole is known."""
    stream, pieces = TextStream(codec, (), True, tuple(stop)), list[str]()
    ids = codec.encode(text)
    for count, token in enumerate(ids, 1):
        pieces.append(stream.put(token))
        if stream.is_stopped:
            break
        if stream.is_whole:
            assert stream.text.encode() == text.encode()[:count]
    pieces.append(stream.end())
    # The end of the first stop string that is complete decides, as tokens come one by one.
    ends = [(text.find(word) + len(word), text.find(word)) for word in stop if word in text]
    assert "".join(pieces) == stream.text == (text[: min(ends)[1]] if ends else text)


def test_bytes_that_are_no_utf8_are_refused_in_one_sentence(codec: TextCodec) -> None:
    with pytest.raises(InputError, match=r"^prompt: 'caf.*' holds bytes that are not UTF-8$"):
        codec.encode(b"caf\xe9".decode(errors="surrogateescape"))


@pytest.fixture(scope="module")
def fallback(codec: TextCodec) -> TextCodec:
    """A tokenizer that spells what is not in its vocabulary in bytes, and decodes only whole runs of them."""
    words = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"a": 256, "b": 257, "<unk>": 258}
    tokenizer = Tokenizer(models.BPE(words, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return replace(codec, tokenizer=tokenizer)


def decode(codec: TextCodec, context: list[int], ids: list[int]) -> str:
    stream = TextStream(codec, context, True)
    return "".join(map(stream.put, ids)) + stream.end()


@given(st.text("a é€🙂", max_size=20), st.integers(0, 80))
def test_a_text_that_is_cut_anywhere_is_the_whole_text(codec: TextCodec, text: str, place: int) -> None:
    """The rest of a character comes with the second part."""
    ids = codec.encode(text)
    assert decode(codec, [], ids[:place]) + decode(codec, ids[:place], ids[place:]) == text


@pytest.mark.parametrize("name", KINDS)
def test_the_pieces_of_any_tokens_are_the_decoded_text(name: str) -> None:
    """Broken characters, bytes in a row and special tokens included, from any place where a letter came last."""
    codec = TextCodec(tokenizer(name), 0, 0)
    decode_whole, letter = codec.tokenizer.decode, [codec.tokenizer.token_to_id("a")]
    for number, ids in enumerate(random_ids(codec.tokenizer, 7, 200)):
        context, rest = ids[: 3 * number % 40] + letter, ids[3 * number % 40 :] + letter
        assert decode(codec, [], ids + letter) == decode_whole(ids + letter)
        assert decode(codec, context, rest) == decode_whole(context + rest)[len(decode_whole(context)) :]


@pytest.mark.parametrize(
    ("content", "text"),
    [(b"a\xe2", "a"), (b"\xe2\x82", ""), (b"\xf0\x9f\x98", ""), (b"\xe2\xc3", "\ufffd"), (b"\xed\x9f", "")]
    + [
        (bad, "\ufffd" * len(bad))
        for bad in (b"\x80", b"\xff", b"\xc1", b"\xe0\x9f", b"\xed\xa0", b"\xf0\x8f", b"\xf4\x90")
    ]
    + [("a\ufffd".encode(), "a\ufffd")],
)
def test_only_the_beginning_of_a_character_waits_at_the_end(codec: TextCodec, content: bytes, text: str) -> None:
    """What no byte can complete is written, as U+FFFD."""
    assert decode(codec, [], [2 + byte for byte in content]) == text


def test_a_stop_string_in_bytes_that_wait_ends_the_text(fallback: TextCodec) -> None:
    stream = TextStream(fallback, [], True, ("é",))
    assert [stream.put(token) for token in fallback.encode("a€é")] == ["a", *[""] * 5]
    assert (stream.end(), stream.text, stream.is_stopped) == ("€", "a€", True)


def test_the_bytes_of_tokens_that_are_bytes(fallback: TextCodec) -> None:
    """A space too, which is not decoded at the beginning of a text."""
    tokenizer = Tokenizer.from_str(fallback.tokenizer.to_str())
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    own = replace(fallback, tokenizer=tokenizer)
    assert [own.token_bytes(token) for token in range(256)] == [bytes([byte]) for byte in range(256)]


@given(st.text("ab é€🙂日", max_size=20), st.integers(0, 20))
def test_a_tokenizer_that_falls_back_to_bytes_goes_on_after_whole_characters(
    fallback: TextCodec, text: str, place: int
) -> None:
    before, after = fallback.encode(text[:place]), fallback.encode(text[place:] + "a")
    assert decode(fallback, before, after) == text[place:] + "a"


def test_a_space_that_only_shows_after_other_tokens_is_kept(codec: TextCodec) -> None:
    """Decoders of the SentencePiece kind leave the space of the first token of a text out."""
    tokenizer = Tokenizer(models.WordLevel({"▁once": 0, "▁upon": 1}, unk_token="▁once"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    codec = replace(codec, tokenizer=tokenizer)
    assert decode(codec, [], [0, 1]) == "once upon"
    assert decode(codec, [0], [1]) == " upon"


def with_prefix(name: str) -> Tokenizer:
    """A tokenizer of letters that puts a space before a text, in one of the ways that there are."""
    letters = {letter: number for number, letter in enumerate("ab▁Ġ")}
    tokenizer, is_bytes = Tokenizer(models.BPE(letters, [])), name == "bytes"
    if name == "prepend":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    elif name == "prepend alone":
        tokenizer.normalizer = normalizers.Prepend("▁")
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    elif is_bytes:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(add_prefix_space=True)])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=name)
    tokenizer.decoder = decoders.ByteLevel() if is_bytes else decoders.Metaspace()
    return tokenizer


@pytest.mark.parametrize("name", ["first", "always", "never", "prepend", "prepend alone", "bytes"])
@given(st.text("ab ", min_size=1, max_size=12), st.integers(0, 12))
def test_text_that_is_added_gets_no_space_before_it(codec: TextCodec, name: str, text: str, place: int) -> None:
    """The tokens are those of the letters as they are, and their bytes one after the other are the text."""
    own = replace(codec, tokenizer=with_prefix(name))
    before, after = text[:place].lstrip(), text[place:]
    ids = own.encode(before) + own.encode_more(after)
    written = b"".join(own.token_bytes(token) for token in ids)
    if before and name != "never":
        assert written.startswith(b" ")
        written = written[1:]
    assert written.decode() == before + after


def test_a_tokenizer_without_such_a_space_adds_text_as_it_is(codec: TextCodec) -> None:
    assert codec.encode_more("a b") == codec.encode("a b")


@pytest.mark.parametrize("text", ["</s>", "a</s>b", " </s> </s>"])
def test_a_model_that_knows_special_tokens_makes_none_of_text(codec: TextCodec, text: str) -> None:
    """As unigram models do, in whose vocabulary they are the likeliest pieces."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("▁", -2.0), *((chr(letter), -3.0) for letter in range(33, 127))]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    own = replace(codec, tokenizer=plain_tokenizer(tokenizer.to_str()), end_id=1)
    for ids in (own.encode(text), own.encode_more(text), own.encode(text, is_start=True)[1:]):
        assert 1 not in ids
        assert "".join(own.tokenizer.id_to_token(token) for token in ids).replace("▁", " ").strip() == text.strip()
    encoder = make_encoder(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>"))
    assert encoder.encode([text])[0].tolist() == own.encode(text)


@pytest.mark.parametrize("name", ["first", "always", "prepend"])
@pytest.mark.parametrize("rest", ["</s>ab b", "a</s> b", "b a"])
def test_text_that_is_added_has_the_tokens_of_the_whole(codec: TextCodec, name: str, rest: str) -> None:
    """Also after special tokens that are read as such, where some tokenizers put a space again."""
    tokenizer = with_prefix(name)
    tokenizer.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    own = replace(codec, tokenizer=tokenizer)
    assert own.encode("ab b") + own.encode_more(rest) == own.encode(f"ab b{rest}")


def test_spaces_that_a_tokenizer_drops_and_writes_anew_are_kept(codec: TextCodec) -> None:
    tokenizer = with_prefix("always")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), tokenizer.pre_tokenizer])
    own = replace(codec, tokenizer=tokenizer)
    assert own.tokenizer.decode(own.encode("a") + own.encode_more(" b a")) == "a b a"


def test_padding_and_rows_without_a_token_are_never_chosen() -> None:
    tokenizer = train_tokenizer([""], "byte", None)
    logits = np.zeros((2, 300), np.float32)
    text_codec(tokenizer).exclude_padding(logits)
    assert np.isfinite(logits).sum() == 2 * 257
    tokenizer.add_tokens(["<|im_end|>"], special_tokens=True)
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    codec, logits = text_codec(tokenizer), np.zeros((1, 300), np.float32)
    codec.exclude_padding(logits)
    assert np.isfinite(logits).sum() == 259  # the end of a text is chosen, also where it pads
    assert [token for token in range(300) if codec.is_end(token)] == [0, 258]
