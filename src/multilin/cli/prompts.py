"""Where a prompt comes from: the command line, a file, or what is piped in."""

import sys
from pathlib import Path

from multilin.errors import InputError


def read_prompt(
    prompt: str | None, prompt_file: str | None, names: tuple[str, str] = ("--prompt", "--prompt-file")
) -> str:
    """The prompt, else the text of the file, else what is piped into stdin, else nothing.

    One newline at the end of a file or pipe, which editors and `echo` add, is left out. `names` are the flags that gave
    the first two, for messages.

    Raises:
        InputError: both are given, the file cannot be read, or not UTF-8.
    """
    if prompt is not None and prompt_file is not None:
        raise InputError(f"{names[1]}: given together with {names[0]}; give one of them")
    if prompt is not None:
        return prompt
    if prompt_file is not None:
        try:
            return _decode(Path(prompt_file).read_bytes(), f"{names[1]}: {prompt_file}")
        except OSError as error:
            raise InputError(f"{names[1]}: {prompt_file} cannot be read ({error.strerror})") from None
    if sys.stdin is not None and not sys.stdin.isatty():
        return _decode(sys.stdin.buffer.read(), "the prompt on stdin")
    return ""


def _decode(content: bytes, name: str) -> str:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{name} is not UTF-8: byte {error.start} is 0x{content[error.start]:02x}") from None
    return text.removesuffix("\n").removesuffix("\r")
