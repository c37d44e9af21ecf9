"""Prompts from the command line, a file, or a pipe."""

import sys

from multilin.errors import InputError
from multilin.settings.inputs import MEGABYTE, check_encoding, read_bytes

LARGEST_PROMPT = 16 * MEGABYTE


def read_prompt(
    prompt: str | None, prompt_file: str | None, names: tuple[str, str] = ("--prompt", "--prompt-file")
) -> str:
    """The prompt, else the text of the file, else the text piped into stdin, else empty.

    One newline at the end of a file or pipe, which editors and `echo` add, is left out. `names` are the flags that gave
    the first two, for messages.

    Raises:
        InputError: both are given, the file is no regular one or cannot be read, more than LARGEST_PROMPT bytes, or
            bytes that are not UTF-8.
    """
    if prompt is not None and prompt_file is not None:
        raise InputError(f"{names[1]}: given together with {names[0]}; give one of them")
    if prompt is not None:
        return prompt
    if prompt_file is not None:
        return _decode(read_bytes(prompt_file, names[1], LARGEST_PROMPT), f"{names[1]}: {prompt_file}")
    if sys.stdin is not None and not sys.stdin.isatty():
        content = sys.stdin.buffer.read(LARGEST_PROMPT + 1)
        if len(content) > LARGEST_PROMPT:
            megabytes = LARGEST_PROMPT // MEGABYTE
            raise InputError(f"the prompt on stdin is longer than {megabytes} MB, the most that is read")
        return _decode(content, "the prompt on stdin")
    return ""


def _decode(content: bytes, name: str) -> str:
    check_encoding(content[:4096], name)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{name} is not UTF-8: byte {error.start} is 0x{content[error.start]:02x}") from None
    return text.removesuffix("\n").removesuffix("\r")
