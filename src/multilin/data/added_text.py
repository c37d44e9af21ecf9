"""Encodes text as tokens. Only the tokenizers library is needed, which is quick to import."""

import json
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from tokenizers import Tokenizer, models


def plain_tokenizer(content: str) -> Tokenizer:
    """A tokenizer from its JSON, without truncation and padding; special tokens spelled in a text are read as text."""
    tokenizer = Tokenizer.from_str(content)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def encode_whole(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a text on its own, without the special tokens that a tokenizer may put around it."""
    # Unlike `Tokenizer.encode` this lets other threads run meanwhile.
    return tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids


class TextReader:
    """Encodes text as tokens. Only the names in `names` become control tokens, never a text that spells a token.

    Attributes:
        names: maps the text of each control token to an unguessable name. Only this name is read as the token.
        tokenizer: encodes whole texts.

    Args:
        tokenizer: a tokenizer without truncation and padding.
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
        """Token ids of text that follows other text. The space that some tokenizers put before a text is left out.

        After a control token the text begins with this space again, as if all text were encoded in one piece.
        """
        place = min((start for name in self._special if (start := text.find(name)) >= 0), default=len(text))
        first, rest = text[:place], text[place:]
        return (encode_whole(self._added, first) if first else []) + (self.encode(rest) if rest else [])


def _special_tokens_in_text(tokenizer: Tokenizer) -> list[str]:
    """The special tokens, if the tokenizer's model may produce special tokens from a text that spells them.

    A unigram model may produce them. BPE cannot, since it joins single characters by merges, and no merge gives a
    special token.
    """
    model = tokenizer.model
    if isinstance(model, models.BPE) and not model.ignore_merges:
        return []
    return [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]


def _renamed(tokenizer: Tokenizer, names: Mapping[str, str]) -> Tokenizer:
    """The tokenizer with other names for some added tokens; the old names are read as text."""
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
    if "merges" in model:  # merges with a control token have its old name
        model["merges"] = [pair for pair in model["merges"] if names.keys().isdisjoint([*pair, "".join(pair)])]
    renamed = plain_tokenizer(json.dumps(content | {"post_processor": None}))  # the post-processor has the old names
    renamed.encode_special_tokens = False
    return renamed


def _without_space_before(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer without the space added before a text; unchanged if that space represents a space of the text."""
    content = json.loads(tokenizer.to_str())
    parts = {name: _without_prefix(content[name]) for name in ("normalizer", "pre_tokenizer")}
    if parts.items() <= content.items() or _drops_spaces(content["pre_tokenizer"]):
        return tokenizer
    return plain_tokenizer(json.dumps(content | parts))


def _without_prefix(part: Any) -> Any:
    """A normalizer or pre-tokenizer as JSON, without the part that puts a space before a text."""
    if isinstance(part, list):
        return [kept for inner in part if (kept := _without_prefix(inner)) is not None]
    if not isinstance(part, dict):
        return part
    if part.get("type") == "Prepend":
        return None
    changes = {"prepend_scheme": "never", "add_prefix_space": False}
    return {name: changes.get(name, _without_prefix(value)) for name, value in part.items()}


def _drops_spaces(part: Any) -> bool:
    """True if a pre-tokenizer, as JSON, drops spaces: a prefix of each piece then represents them."""
    kinds = [inner.get("type") for inner in (part or {}).get("pretokenizers", [])]
    return any(kind in ("WhitespaceSplit", "Whitespace", "BertPreTokenizer") for kind in kinds)
