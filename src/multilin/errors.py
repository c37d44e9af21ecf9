"""The one exception for bad input, whose message is a sentence a user can act on, and helpers for such sentences."""

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """Bad input: the message names the field, the value and what would be accepted.

    The command line prints the message alone and exits with status 2; in a program it is a ValueError.
    """


def system_error(error: OSError) -> str:
    """What the operating system refused, as the end of a sentence: `results.json: No space left on device`."""
    reason = error.strerror or " ".join(str(error).split())
    return f"{error.filename}: {reason}" if error.filename else reason


def nearest(word: str, choices: Iterable[str]) -> str:
    """A hint to append to a message: `; did you mean 'window'?`, or nothing when no choice is close."""
    matches = difflib.get_close_matches(word, list(choices), n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def plural(number: int, noun: str) -> str:
    """A count with its noun: `1 document`, `1,204 documents`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
