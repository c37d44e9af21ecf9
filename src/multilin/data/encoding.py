"""Encodes texts as token ids, exactly and quickly, and computes the bytes of tokens.

The module uses the tokenizers library without transformers, so that it is quick to import.
"""

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from multilin.data.added_text import TextReader, plain_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PIECE_CHARACTERS = 2**20
WORDS_KEPT, CHARACTERS_KEPT = 2**19, 2**25

# ByteLevel's regular expression never looks back, and its matches of letters, digits and signs end where a whitespace
# begins. So parts that are cut there are split as in the whole text. \x1c-\x1f are whitespace to Python only.
_WORD = re.compile(r"\s*[\S\x1c-\x1f]+|\s+")
_CUT = re.compile(r"(?<=\S)(?=[^\S\x1c-\x1f])")

_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that represent themselves
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
# The characters that represent bytes in GPT-2's vocabulary, to these bytes.
BYTES = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + place): byte for place, byte in enumerate(_OTHERS)}


def cut_at_whitespace(text: str, characters: int) -> Iterator[str]:
    """Parts of a text, each a little longer than `characters` and cut before whitespace.

    A tokenizer that splits words as GPT-2 does makes the same tokens from the parts as from the whole text.
    """
    start = 0
    while len(text) - start > characters and (cut := _CUT.search(text, start + characters)):
        yield text[start : cut.start()]
        start = cut.start()
    yield text[start:]


class Encoder:
    """Encodes whole texts, several at a time on several cores."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend

    def pieces(self, text: str) -> Iterator[str]:
        """Parts of a text, of bounded size if possible; the ids of the parts, joined, are the ids of the text."""
        yield text  # it is not known where the text may be cut

    def encode(self, texts: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The ids of all texts, concatenated, and the number of ids of each text."""
        encoded = [encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)]
        counts = np.array([len(ids) for ids in encoded], dtype=np.int64)
        return np.fromiter(itertools.chain.from_iterable(encoded), np.int64, counts.sum()), counts


def make_encoder(tokenizer: "PreTrainedTokenizerFast") -> Encoder:
    """The fastest encoder that gives exactly the tokenizer's ids. A special token spelled in a text is read as text."""
    backend = TextReader(plain_tokenizer(tokenizer.backend_tokenizer.to_str())).tokenizer
    return WordEncoder(backend) if _splits_at_whitespace(backend) else Encoder(backend)


def _splits_at_whitespace(backend: Tokenizer) -> bool:
    content = json.loads(backend.to_str())
    splitter = content["pre_tokenizer"] or {}
    return (
        content["normalizer"] is None
        and splitter.get("type") == "ByteLevel"
        and splitter.get("use_regex", True)
        and not splitter.get("add_prefix_space", True)
        and all(token["special"] for token in content["added_tokens"])
        and not content["model"].get("dropout")
    )


class WordEncoder(Encoder):
    """Encodes every distinct word (with the whitespace before it) once and then looks the word up."""

    def __init__(self, backend: Tokenizer) -> None:
        super().__init__(backend)
        self._index: dict[str, int] = {}
        self._size = 0  # characters of all words in the table
        self._starts = self._lengths = self._ids = np.zeros(0, np.int64)

    def pieces(self, text: str) -> Iterator[str]:
        """The text cut at whitespace, about every million characters."""
        yield from cut_at_whitespace(text, PIECE_CHARACTERS)

    def encode(self, texts: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The ids of all texts, concatenated, and the number of ids of each text."""
        words_of_texts = [_WORD.findall(text) for text in texts]
        words = list(itertools.chain.from_iterable(words_of_texts))
        self._learn(words)
        index = np.fromiter(map(self._index.__getitem__, words), np.int64, len(words))
        lengths = self._lengths[index]
        ends = np.concatenate([[0], np.cumsum(lengths)])
        places = np.repeat(self._starts[index] - ends[:-1], lengths) + np.arange(ends[-1])
        text_ends = ends[np.cumsum([0, *map(len, words_of_texts)])]
        return self._ids[places], np.diff(text_ends)

    def _learn(self, words: list[str]) -> None:
        if len(self._index) > WORDS_KEPT or self._size > CHARACTERS_KEPT:
            self._index.clear()
            self._size = 0
            self._starts = self._lengths = self._ids = np.zeros(0, np.int64)
        new = list(set(words).difference(self._index))
        ids, lengths = super().encode(new)
        self._size += sum(map(len, new))
        self._index.update(zip(new, range(len(self._index), len(self._index) + len(new)), strict=True))
        self._starts = np.concatenate([self._starts, len(self._ids) + np.cumsum(lengths) - lengths])
        self._lengths = np.concatenate([self._lengths, lengths])
        self._ids = np.concatenate([self._ids, ids])


def token_bytes(name: str, text: str) -> bytes:
    """The UTF-8 bytes of a token; a token may be a part of a character.

    Args:
        name: the token's entry in the vocabulary.
        text: the text of the token decoded alone, in which U+FFFD represents a part of a character.
    """
    if is_byte_name(name) and text != name:
        return bytes.fromhex(name[3:5])
    if name.startswith("▁"):  # SentencePiece's space, which is not decoded at the beginning of a text
        return name.replace("▁", " ").encode()
    if "\ufffd" in text and all(character in BYTES for character in name):
        return bytes(BYTES[character] for character in name)
    return text.encode()


def is_byte_name(name: str) -> bool:
    """True for the names of single bytes in SentencePiece's vocabularies, such as <0xE4>."""
    return re.fullmatch("<0x[0-9A-Fa-f]{2}>", name) is not None
