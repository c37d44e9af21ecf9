"""The tokens of a prompt."""

from transformers import PreTrainedTokenizerFast

from multilin.data.encoding import make_encoder
from multilin.errors import InputError, shown


def encode_prompt(prompt: str, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Token ids of the prompt alone, without a start token.

    Raises:
        InputError: text that came from bytes which are not UTF-8.
    """
    try:
        ids, _ = make_encoder(tokenizer).encode([prompt])
    except UnicodeEncodeError:
        raise InputError(f"prompt: {shown(prompt)} holds bytes that are not UTF-8") from None
    found: list[int] = ids.tolist()
    return found
