"""Streams of text from tokens."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from multilin.data.tokenizers import train_tokenizer
from multilin.inference.generate_run import text_codec
from multilin.inference.text import TextCodec, TextStream


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


def decode(codec: TextCodec, context: list[int], ids: list[int]) -> str:
    stream = TextStream(codec, context, True)
    return "".join(map(stream.put, ids)) + stream.end()


@given(st.text("a é€🙂", max_size=20), st.integers(0, 80))
def test_a_text_that_is_cut_anywhere_is_the_whole_text(codec: TextCodec, text: str, place: int) -> None:
    """The rest of a character comes with the second part."""
    ids = codec.encode(text)
    assert decode(codec, [], ids[:place]) + decode(codec, ids[:place], ids[place:]) == text


def test_a_space_that_only_shows_after_other_tokens_is_kept(codec: TextCodec) -> None:
    """Decoders of the SentencePiece kind leave the space of the first token of a text out."""
    tokenizer = Tokenizer(models.WordLevel({"▁once": 0, "▁upon": 1}, unk_token="▁once"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    codec = replace(codec, tokenizer=tokenizer)
    assert decode(codec, [], [0, 1]) == "once upon"
    assert decode(codec, [0], [1]) == " upon"
