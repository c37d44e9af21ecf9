"""The bytes of tokens, from the names that byte-level vocabularies give them."""

import re

_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that stand for themselves
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
# Bytes by the characters that stand for them, as GPT-2 has them.
BYTES = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + place): byte for place, byte in enumerate(_OTHERS)}


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
