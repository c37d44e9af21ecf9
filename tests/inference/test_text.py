"""Streams of text from tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multilin.data.tokenizers import train_tokenizer
from multilin.inference.generate_run import text_codec
from multilin.inference.text import TextCodec, TextStream


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return text_codec(train_tokenizer([""], "byte", None))


@given(st.text("abü", max_size=30), st.lists(st.text("abü", min_size=1, max_size=6), max_size=3))
def test_a_stream_ends_before_the_first_stop_string(codec: TextCodec, text: str, stop: list[str]) -> None:
    """Nothing is passed on too early, nothing is lost, and what is whole is known."""
    stream, pieces = TextStream(codec, skip_special_tokens=True, stop=tuple(stop)), list[str]()
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
