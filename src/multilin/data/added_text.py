"""Tokens of text that follows other text, with the tokenizers library alone, which is imported quickly."""

import json
from typing import Any

from tokenizers import Tokenizer


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


class AddedTextEncoder:
    """Encodes text that follows other text, without the space that some tokenizers put before a text.

    A special token that is read as one begins a text again, so that the space comes after it, as in one piece.

    Args:
        tokenizer: encodes whole texts, without truncation and padding.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder().values()
        self._whole = tokenizer
        self._added = _without_space_before(tokenizer)
        self._special = [] if tokenizer.encode_special_tokens else [token.content for token in added if token.special]

    def encode(self, text: str) -> list[int]:
        """Token ids of the text."""
        place = min((start for name in self._special if (start := text.find(name)) >= 0), default=len(text))
        first = encode_whole(self._added, text[:place]) if place else []
        return first + (encode_whole(self._whole, text[place:]) if place < len(text) else [])


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
