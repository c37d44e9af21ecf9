"""Prompts as tokens and tokens as text, streamed; with the tokenizers library alone, which is imported in no time."""

from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from multilin.errors import InputError, shown


@dataclass(frozen=True)
class TextCodec:
    """A tokenizer as generation needs it.

    tokenizer: of the tokenizers library.
    end_id: the token that ends a text, with which a text also begins.
    pad_id: the token of padding; the same or another one.
    """

    tokenizer: Tokenizer
    end_id: int
    pad_id: int

    @classmethod
    def from_file(cls, path: Path, end_id: int, pad_id: int) -> "TextCodec":
        """That of a tokenizer.json."""
        return cls(plain_tokenizer(path.read_text(encoding="utf-8")), end_id, pad_id)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text alone; special tokens that are spelled out in it are text.

        Raises:
            InputError: text that came from bytes which are not UTF-8.
        """
        try:
            ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        except UnicodeEncodeError:
            raise InputError(f"prompt: {shown(text)} holds bytes that are not UTF-8") from None
        return ids


def plain_tokenizer(content: str) -> Tokenizer:
    """A tokenizer from its JSON, without truncation and padding, for which special tokens in a text are text."""
    tokenizer = Tokenizer.from_str(content)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


@dataclass
class TextStream:
    """Turns tokens into pieces of text that are certain: no half of a character, and nothing of a stop string.

    codec: of the tokens.
    skip_special_tokens: leave out tokens that are no text.
    stop: strings before which the text ends.
    text: all pieces so far.
    is_stopped: a stop string came.
    is_whole: all tokens so far are in the text: no character is cut and no stop string may have begun.
    """

    codec: TextCodec
    skip_special_tokens: bool
    stop: tuple[str, ...] = ()
    text: str = ""
    is_stopped: bool = False
    is_whole: bool = True
    _held: str = ""
    _decoder: DecodeStream = field(init=False)

    def __post_init__(self) -> None:
        self._decoder = DecodeStream(skip_special_tokens=self.skip_special_tokens)

    def put(self, token_id: int) -> str:
        """The text that a further token makes certain, often none."""
        new = self._decoder.step(self.codec.tokenizer, token_id) or ""
        self._held += new
        ends = [index for word in self.stop if (index := self._held.find(word)) >= 0]
        if ends:
            self._held, self.is_stopped = self._held[: min(ends)], True
            return self.end()
        # What a stop string may begin with waits.
        most = min(max((len(word) for word in self.stop), default=1) - 1, len(self._held))
        num_held = next((n for n in range(most, 0, -1) if self._may_stop(self._held[-n:])), 0)
        self.is_whole = bool(new) and not num_held
        return self._release(len(self._held) - num_held)

    @property
    def length(self) -> int:
        """Characters so far, those that wait included."""
        return len(self.text) + len(self._held)

    def end(self) -> str:
        """What is left at the end."""
        return self._release(len(self._held))

    def _may_stop(self, tail: str) -> bool:
        return any(word.startswith(tail) for word in self.stop)

    def _release(self, length: int) -> str:
        piece, self._held = self._held[:length], self._held[length:]
        self.text += piece
        return piece
