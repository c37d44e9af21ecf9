"""Settings that all ways of running a server share."""

import os
from typing import Annotated

from annotated_types import MaxLen
from pydantic import AfterValidator

from multilin.settings import settings
from multilin.settings.bounds import Amount, Count, Length, PathText

KEY_VARIABLE = "MULTILIN_API_KEY"


def num_bytes(text: str) -> int:
    """Convert a text such as 500MB to a number of bytes."""
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
    number, unit = text[:-2].strip(), text[-2:].upper()
    if unit not in units or not number.replace(".", "", 1).isdecimal():
        raise ValueError(f"{text!r} given, but it should be a size such as 500MB or 2GB")
    return int(float(number) * units[unit])


def _check_size(text: str) -> str:
    num_bytes(text)
    return text


Bytes = Annotated[str, MaxLen(20), AfterValidator(_check_size)]


@settings
class ServeLimits:
    """Limits of the server: how many requests run at a time, how long they are, and how large stored states are."""

    slots: Count = 64  # sequences that are generated at a time
    queue: Count = 256  # requests that may wait; further requests are refused with 429
    max_tokens: Count = 4096  # largest number of tokens to generate for a request
    max_prompt: Length = 65536  # largest number of tokens to read for a request
    memory: Bytes = "1GB"  # largest size of all states kept in memory
    sessions: PathText | None = None  # folder, or address for fsspec, where states and sessions outlive the server
    disk: Bytes = "100GB"  # largest size of all states in that folder; the oldest states are deleted first
    keep_days: Amount | None = None  # days after which states are deleted


def split_keys(text: str | None) -> list[str]:
    """Split a text with API keys at commas; None takes the text from the environment."""
    given = os.environ.get(KEY_VARIABLE, "") if text is None else text
    return [key.strip() for key in given.split(",") if key.strip()]
