"""Encoding of prompts and streaming of generated text, with only the tokenizers library, which imports quickly."""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from multilin.data.added_text import TextReader
from multilin.data.encoding import is_byte_name, token_bytes
from multilin.errors import InputError, shown

CONTEXT = 8  # tokens before a text on which its decoding can depend
MOST_UNFINISHED = 3  # most bytes of a character without its last byte
# The bytes of an unfinished character at an end, after the Unicode standard's table of well-formed UTF-8.
UNFINISHED = re.compile(
    rb"(?:[\xc2-\xf4]|\xe0[\xa0-\xbf]|\xed[\x80-\x9f]|[\xe1-\xec\xee\xef][\x80-\xbf]"
    rb"|(?:\xf0[\x90-\xbf]|[\xf1-\xf3][\x80-\xbf]|\xf4[\x80-\x8f])[\x80-\xbf]?)\Z"
)


@dataclass(frozen=True)
class TextCodec:
    """A tokenizer with the special tokens that generation needs.

    tokenizer: see `multilin.data.encoding.plain_tokenizer`.
    end_id: the token that begins and ends a text.
    pad_id: the token of padding; may be the same token.
    eos_id: another token that ends a text, if the tokenizer got it after the model's training.
    """

    tokenizer: Tokenizer
    end_id: int
    pad_id: int
    eos_id: int | None = None

    def encode(self, text: str, *, is_start: bool = False) -> list[int]:
        """Token ids of a text, after the start token if `is_start`.

        Raises:
            InputError: text that came from bytes which are not UTF-8.
        """
        ids = self._reader.encode(checked(text))
        return [self.end_id, *ids] if is_start else ids

    def encode_more(self, text: str) -> list[int]:
        """Token ids of text that follows other text, without the space that some tokenizers put before a text.

        Raises:
            InputError: text that came from bytes which are not UTF-8.
        """
        return self._reader.encode_more(checked(text))

    @functools.cached_property
    def _reader(self) -> TextReader:
        return TextReader(self.tokenizer)

    def is_cut(self, token_ids: Sequence[int]) -> bool:
        """True if these tokens end inside a character."""
        return self._num_unfinished(token_ids) > 0

    def is_certain(self, token_ids: Sequence[int]) -> bool:
        """True if no later token changes the text of these tokens: no character or run of bytes is cut."""
        return not (self.is_cut(token_ids) or (token_ids and self._is_fallback(token_ids[-1])))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of tokens, without an unfinished character at its end."""
        cut = self._num_unfinished(token_ids)
        if cut and self._is_fallback(token_ids[-1]):  # single bytes, which would make the bytes before them unreadable
            token_ids, cut = token_ids[:-cut], 0
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text[:-1] if cut else text  # without the U+FFFD of the unfinished character

    def _num_unfinished(self, token_ids: Sequence[int]) -> int:
        """The number of bytes at the end that begin an unfinished character."""
        if not token_ids or self.token_bytes(token_ids[-1])[-1:].isascii():
            return 0
        found = UNFINISHED.search(b"".join(map(self.token_bytes, token_ids[-MOST_UNFINISHED:])))
        return len(found[0]) if found else 0

    def _is_fallback(self, token_id: int) -> bool:
        """True for a SentencePiece token of one byte; an invalid byte makes a whole run of such tokens unreadable."""
        return self._has_fallback and is_byte_name(self.tokenizer.id_to_token(token_id) or "")

    @functools.cached_property
    def _has_fallback(self) -> bool:
        return self.tokenizer.decoder is not None and b"ByteFallback" in self.tokenizer.decoder.__getstate__()

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """The special tokens, which have no text."""
        added = self.tokenizer.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes of a token, which may be a part of a character."""
        text = self.tokenizer.decode([token_id], skip_special_tokens=False)
        return token_bytes(self.tokenizer.id_to_token(token_id) or "", text)

    def exclude_padding(self, logits_BV: NDArray[np.float32]) -> None:
        """Give the padding token no probability, in place: this logit was never trained.

        Rows that pad an embedding to a round size have no token, and also get no probability.
        """
        if not self.is_end(self.pad_id):
            logits_BV[:, self.pad_id] = -np.inf
        logits_BV[:, self.num_tokens :] = -np.inf

    def is_end(self, token_id: int) -> bool:
        """True for a token that ends a text."""
        return token_id in (self.end_id, self.eos_id)

    @functools.cached_property
    def num_tokens(self) -> int:
        """Number of tokens; the model's embedding may have more rows."""
        return self.tokenizer.get_vocab_size()


def checked(text: str) -> str:
    """Return the text unchanged.

    Raises:
        InputError: the text came from bytes that are not UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"prompt: {shown(text)} holds bytes that are not UTF-8") from None
    return text


@dataclass
class TextStream:
    """Turns tokens into pieces of text that later tokens cannot change, without half characters or half stop strings.

    All pieces together are the decoded text, without an unfinished character at its end. A later stream
    that gets these tokens as `context` gives the whole character.

    codec: decodes the tokens.
    context: the tokens before the text; a space or the rest of a character at the text's beginning depends on them.
    skip_special_tokens: leave out special tokens.
    stop: strings before which the text ends.
    text: all pieces so far.
    is_stopped: whether a stop string came.
    is_whole: whether `text` holds all tokens so far: no character is cut, and no stop string may have begun.
    """

    codec: TextCodec
    context: Sequence[int]
    skip_special_tokens: bool
    stop: tuple[str, ...] = ()
    text: str = ""
    is_stopped: bool = False
    is_whole: bool = True
    _held: str = ""
    _ids: list[int] = field(init=False)  # the last tokens
    _num_certain: int = field(init=False)  # tokens at the beginning of `_ids` whose text is certain
    _num_shown: int = field(init=False)  # characters of the text of `_ids` that were given before

    def __post_init__(self) -> None:
        start, codec = max(len(self.context) - CONTEXT, 0), self.codec
        # Some tokenizers decode text wrongly after half a character, or after no text.
        while start and not (
            codec.is_certain(self.context[max(start - MOST_UNFINISHED, 0) : start])
            and self._decode(self.context[start:])
        ):
            start -= 1
        hidden = codec.special_ids if self.skip_special_tokens else ()
        self._ids = [token_id for token_id in self.context[start:] if token_id not in hidden]
        self._num_certain, self._num_shown = 0, len(self._decode(self._ids))

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self.codec.decode(token_ids, skip_special_tokens=self.skip_special_tokens)

    def put(self, token_id: int) -> str:
        """The new text that is certain after one more token, often none."""
        if not (self.skip_special_tokens and token_id in self.codec.special_ids):
            self._ids.append(token_id)
        is_certain = self.codec.is_certain(self._ids)
        if is_certain:
            self._take_news()
            last = self._ids[self._num_certain :]
            if len(self._ids) > 2 * CONTEXT and (num_characters := len(self._decode(last))):
                self._ids, self._num_shown = last, num_characters
            self._num_certain = len(self._ids)
        # Text that may begin a stop string is held back.
        most = 0 if self.is_stopped else min(max(map(len, self.stop), default=1) - 1, len(self._held))
        num_held = next(
            (n for n in range(most, 0, -1) if any(word.startswith(self._held[-n:]) for word in self.stop)), 0
        )
        self.is_whole = is_certain and not num_held and not self.is_stopped
        return self._release(len(self._held) - num_held)

    def _take_news(self) -> None:
        """Add the new text of the tokens to `_held`, up to a stop string."""
        text = self._decode(self._ids)
        self._held, self._num_shown = self._held + text[self._num_shown :], len(text)
        ends = [index for word in self.stop if (index := self._held.find(word)) >= 0]
        if ends:
            self._held, self.is_stopped = self._held[: min(ends)], True

    @property
    def length(self) -> int:
        """Number of characters so far, including text that is held back."""
        return len(self.text) + len(self._held)

    def begin(self, token_id: int, length: int) -> int:
        """Where the last token's text begins: at `length`, or later if it first completes an earlier character."""
        return max(length, self.length - len(self.codec.token_bytes(token_id).decode(errors="replace")))

    def end(self) -> str:
        """The text that was held back, after the last token."""
        if not self.is_stopped:
            self._take_news()
        return self._release(len(self._held))

    def _release(self, length: int) -> str:
        piece, self._held = self._held[:length], self._held[length:]
        self.text += piece
        return piece
