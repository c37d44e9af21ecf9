"""Prompts as tokens, and tokens as streamed text, with the tokenizers library alone, which is imported quickly."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from multilin.data.added_text import AddedTextEncoder, encode_whole
from multilin.data.byte_level import token_bytes
from multilin.errors import InputError, shown

CONTEXT = 8  # tokens before a text that can matter to how it is decoded
UNKNOWN = "\ufffd"  # what part of a character is decoded as
LONGEST_CHARACTER = 4  # tokens, one for each byte


@dataclass(frozen=True)
class TextCodec:
    """A tokenizer with the special tokens that generation needs.

    tokenizer: see `multilin.data.added_text.plain_tokenizer`.
    end_id: the token that begins and ends a text.
    pad_id: the token of padding; may be the same token.
    eos_id: another token that ends a text, if the tokenizer got one after the model's training.
    """

    tokenizer: Tokenizer
    end_id: int
    pad_id: int
    eos_id: int | None = None

    def encode(self, text: str, *, is_start: bool = False) -> list[int]:
        """Token ids of a text, after the start token if it begins there.

        Raises:
            InputError: text that came from bytes which are not UTF-8.
        """
        ids = encode_whole(self.tokenizer, _checked(text))
        return [self.end_id, *ids] if is_start else ids

    def encode_more(self, text: str) -> list[int]:
        """Token ids of text that follows other text, without the space that some tokenizers put before a text.

        Raises:
            InputError: text that came from bytes which are not UTF-8.
        """
        return self._added_text.encode(_checked(text))

    @functools.cached_property
    def _added_text(self) -> AddedTextEncoder:
        return AddedTextEncoder(self.tokenizer)

    def is_cut(self, token_ids: list[int]) -> bool:
        """True if these tokens end inside a character."""
        return self.tokenizer.decode(token_ids).endswith(UNKNOWN)

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes of a token, which may be a part of a character."""
        text = self.tokenizer.decode([token_id], skip_special_tokens=False)
        return token_bytes(self.tokenizer.id_to_token(token_id) or "", text)

    def exclude_padding(self, logits_BV: NDArray[np.float32]) -> None:
        """Give the padding token no probability, in place: this logit was never trained.

        The same goes for rows of an embedding that was padded to a round size, which stand for no token.
        """
        if not self.is_end(self.pad_id):
            logits_BV[:, self.pad_id] = -np.inf
        logits_BV[:, self.num_tokens :] = -np.inf

    def is_end(self, token_id: int) -> bool:
        """True for a token that ends a text."""
        return token_id in (self.end_id, self.eos_id)

    @functools.cached_property
    def num_tokens(self) -> int:
        """Number of tokens; the model may have more rows for them."""
        return self.tokenizer.get_vocab_size()


def _checked(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"prompt: {shown(text)} holds bytes that are not UTF-8") from None
    return text


@dataclass
class TextStream:
    """Turns tokens into pieces of text that later tokens cannot change: no half characters, no part of a stop string.

    codec: decodes the tokens.
    context: the tokens before the text, from the beginning of a character on if they are few: a space or the rest of a
        character that begins the text depends on them.
    skip_special_tokens: leave out special tokens.
    stop: strings before which the text ends.
    text: all pieces so far.
    is_stopped: a stop string came.
    is_whole: `text` holds all tokens so far: no character is cut, and no stop string may have begun.
    """

    codec: TextCodec
    context: Sequence[int]
    skip_special_tokens: bool
    stop: tuple[str, ...] = ()
    text: str = ""
    is_stopped: bool = False
    is_whole: bool = True
    _held: str = ""
    _decoder: DecodeStream = field(init=False)

    def __post_init__(self) -> None:
        self._decoder = DecodeStream(skip_special_tokens=self.skip_special_tokens)
        for token_id in self._end_of_context():
            self._decoder.step(self.codec.tokenizer, token_id)

    def _end_of_context(self) -> Sequence[int]:
        """Some tokens that begin with a character: half of one would spoil what some tokenizers decode after it."""
        if len(self.context) <= CONTEXT:
            return self.context
        for count in range(CONTEXT, CONTEXT + LONGEST_CHARACTER):
            if not self.codec.tokenizer.decode(list(self.context[-count:])).startswith(UNKNOWN):
                return self.context[-count:]
        return self.context[-CONTEXT:]  # bytes that are no characters

    def put(self, token_id: int) -> str:
        """The new text that is certain after one more token, often none."""
        new = self._decoder.step(self.codec.tokenizer, token_id) or ""
        self._held += new
        ends = [index for word in self.stop if (index := self._held.find(word)) >= 0]
        if ends:
            self._held, self.is_stopped = self._held[: min(ends)], True
            return self.end()
        # Text that may begin a stop string is held back.
        most = min(max((len(word) for word in self.stop), default=1) - 1, len(self._held))
        num_held = next(
            (n for n in range(most, 0, -1) if any(word.startswith(self._held[-n:]) for word in self.stop)), 0
        )
        self.is_whole = bool(new) and not num_held
        return self._release(len(self._held) - num_held)

    @property
    def length(self) -> int:
        """Number of characters so far, including text that is held back."""
        return len(self.text) + len(self._held)

    def begin(self, token_id: int, length: int) -> int:
        """Characters before the token that was put last: `length` as before it, and broken ones that came with it."""
        return max(length, self.length - len(self.codec.token_bytes(token_id).decode(errors="replace")))

    def end(self) -> str:
        """The rest of the text, at the end."""
        return self._release(len(self._held))

    def _release(self, length: int) -> str:
        piece, self._held = self._held[:length], self._held[length:]
        self.text += piece
        return piece
