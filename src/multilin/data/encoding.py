"""Texts as token ids, exactly and quickly, and the bytes of tokens, with the tokenizers library alone.

transformers is not imported, so that this module loads quickly.
"""

import itertools
import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, models

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PIECE_CHARACTERS = 2**20
WORDS_KEPT, CHARACTERS_KEPT = 2**19, 2**25

# ByteLevel's expression looks at no character before the one it stands at, and its matches of letters, digits and signs
# end where a whitespace begins. So words that are cut there are split the same way alone. \x1c-\x1f are whitespace to
# Python only.
_WORD = re.compile(r"\s*[\S\x1c-\x1f]+|\s+")
_CUT = re.compile(r"(?<=\S)(?=[^\S\x1c-\x1f])")

_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that stand for themselves
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
# Bytes by the characters that stand for them, as GPT-2 has them.
BYTES = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + place): byte for place, byte in enumerate(_OTHERS)}


def plain_tokenizer(content: str) -> Tokenizer:
    """A tokenizer from its JSON, without truncation and padding; names of special tokens are read as text."""
    tokenizer = Tokenizer.from_str(content)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def encode_whole(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a text on its own, without special tokens that are put around it."""
    # Unlike `Tokenizer.encode` this lets other threads run meanwhile.
    return tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids


class TextReader:
    """Reads text as tokens. Text never becomes a control token, whatever it spells; only `names` do.

    Attributes:
        names: of each control token the name, which cannot be guessed, that is read as this token.
        tokenizer: reads whole texts.

    Args:
        tokenizer: without truncation and padding.
        control: the texts of the control tokens; None takes the special tokens.
    """

    def __init__(self, tokenizer: Tokenizer, control: Iterable[str] | None = None) -> None:
        if control is None:
            control = _special_tokens_in_text(tokenizer)
        self.names = {text: f"<{secrets.token_hex(16)}>" for text in control}
        self.tokenizer = _renamed(tokenizer, self.names) if self.names else tokenizer
        self._added = _without_space_before(self.tokenizer)
        added = self.tokenizer.get_added_tokens_decoder().values()
        reads_special = not self.tokenizer.encode_special_tokens
        self._special = [token.content for token in added if token.special and reads_special]

    def encode(self, text: str) -> list[int]:
        """Token ids of a text on its own."""
        return encode_whole(self.tokenizer, text)

    def encode_more(self, text: str) -> list[int]:
        """Token ids of text that follows other text, without the space that some tokenizers put before a text.

        A control token begins a text again, so that the space comes after it, as in one piece.
        """
        place = min((start for name in self._special if (start := text.find(name)) >= 0), default=len(text))
        first, rest = text[:place], text[place:]
        return (encode_whole(self._added, first) if first else []) + (self.encode(rest) if rest else [])


def _special_tokens_in_text(tokenizer: Tokenizer) -> list[str]:
    """The special tokens, if the model may take one for a piece of text although the tokenizer does not look for them.

    Unigram models do so, for example; BPE makes text of single characters, which no merge joins to a special token.
    """
    model = tokenizer.model
    if isinstance(model, models.BPE) and not model.ignore_merges:
        return []
    return [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]


def _renamed(tokenizer: Tokenizer, names: Mapping[str, str]) -> Tokenizer:
    """The tokenizer with other names for some added tokens; the old ones are read as text."""
    content = json.loads(tokenizer.to_str())
    for token in content["added_tokens"]:
        if token["content"] in names:
            # A name is found before the text is normalized, beside letters too.
            token |= {"content": names[token["content"]], "special": True, "normalized": False, "single_word": False}
    model = content["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(text, text): number for text, number in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(text, text), score] for text, score in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:  # those with a control token could no longer be read
        model["merges"] = [pair for pair in model["merges"] if names.keys().isdisjoint([*pair, "".join(pair)])]
    renamed = plain_tokenizer(json.dumps(content | {"post_processor": None}))  # it adds tokens by their old names
    renamed.encode_special_tokens = False
    return renamed


def _without_space_before(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer without the space before a text; as it is where that space stands for one of the text."""
    content = json.loads(tokenizer.to_str())
    parts = {name: _without_prefix(content[name]) for name in ("normalizer", "pre_tokenizer")}
    if parts.items() <= content.items() or _drops_spaces(content["pre_tokenizer"]):
        return tokenizer
    return plain_tokenizer(json.dumps(content | parts))


def _without_prefix(part: Any) -> Any:
    """A normalizer or pre-tokenizer as JSON, without what puts a space before a text."""
    if isinstance(part, list):
        return [kept for inner in part if (kept := _without_prefix(inner)) is not None]
    if not isinstance(part, dict):
        return part
    if part.get("type") == "Prepend":
        return None
    changes = {"prepend_scheme": "never", "add_prefix_space": False}
    return {name: changes.get(name, _without_prefix(value)) for name, value in part.items()}


def _drops_spaces(part: Any) -> bool:
    """True for a pre-tokenizer, as JSON, that drops spaces: what is then put before each piece stands for them."""
    kinds = [inner.get("type") for inner in (part or {}).get("pretokenizers", [])]
    return any(kind in ("WhitespaceSplit", "Whitespace", "BertPreTokenizer") for kind in kinds)


def cut_at_whitespace(text: str, characters: int) -> Iterator[str]:
    """Parts of a text, each a little longer than `characters` and cut before whitespace.

    A tokenizer that splits words as GPT-2's makes the same tokens from the parts as from the whole text.
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
        """Parts of a text, of bounded size if possible, whose ids in a row are the ids of the text."""
        yield text  # it is not known where the text may be cut

    def encode(self, texts: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The ids of all texts in a row, and the number of ids of each."""
        encoded = [encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)]
        counts = np.array([len(ids) for ids in encoded], dtype=np.int64)
        return np.fromiter(itertools.chain.from_iterable(encoded), np.int64, counts.sum()), counts


def make_encoder(tokenizer: "PreTrainedTokenizerFast") -> Encoder:
    """The fastest encoder with exactly the tokenizer's ids. Special tokens that are spelled out in a text are text."""
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
    """Encodes every distinct word (with the whitespace before it) once and then looks it up."""

    def __init__(self, backend: Tokenizer) -> None:
        super().__init__(backend)
        self._index: dict[str, int] = {}
        self._size = 0  # characters of all words in it
        self._starts = self._lengths = self._ids = np.zeros(0, np.int64)

    def pieces(self, text: str) -> Iterator[str]:
        """The text cut at whitespace, about every million characters."""
        yield from cut_at_whitespace(text, PIECE_CHARACTERS)

    def encode(self, texts: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The ids of all texts in a row, and the number of ids of each."""
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
    """The UTF-8 bytes of a token, which may be a part of a character.

    Args:
        name: its entry in the vocabulary.
        text: what the token alone decodes to; U+FFFD stands for a part of a character.
    """
    if is_byte_name(name) and text != name:
        return bytes.fromhex(name[3:5])
    if name.startswith("▁"):  # SentencePiece's space, which is not decoded at the beginning of a text
        return name.replace("▁", " ").encode()
    if "\ufffd" in text and all(character in BYTES for character in name):
        return bytes(BYTES[character] for character in name)
    return text.encode()


def is_byte_name(name: str) -> bool:
    """True for the names of single bytes in SentencePiece's vocabularies, as <0xE4>."""
    return re.fullmatch("<0x[0-9A-Fa-f]{2}>", name) is not None
