"""The exception InputError for bad input, with a message that tells a user what to change; helpers for messages."""

import contextlib
import difflib
import math
import reprlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

LONGEST_MESSAGE = 1000
LONGEST_VALUE = 100


class InputError(ValueError):
    """The error for bad input: its message names the field, the value and what is accepted.

    The command line prints only this message and exits with status 2. In a program, the error is a ValueError. A
    message longer than LONGEST_MESSAGE characters is cut in its middle.
    """

    def __init__(self, message: str) -> None:
        super().__init__(shorten(message, LONGEST_MESSAGE))


def system_error(error: OSError) -> str:
    """The file and the reason of a system error, for the end of a message: `results.json: No space left on device`."""
    reason = error.strerror or " ".join(str(error).split())
    return f"{error.filename}: {reason}" if error.filename else reason


@contextlib.contextmanager
def as_input_error(sentence: Callable[[str], str], kind: type[Exception] = Exception) -> Iterator[None]:
    """Turn errors of other libraries, which have many types, into an InputError.

    Args:
        sentence: function that makes the message; its argument is one line with the error's type and text.
        kind: the type of the errors that are turned.
    """
    try:
        yield
    except InputError:
        raise
    except kind as error:
        reason = shorten(f"{type(error).__name__}: {' '.join(str(error).split())}", 200)
        raise InputError(sentence(reason)) from error


@contextlib.contextmanager
def prefixed(prefix: str, replaced: str = "") -> Iterator[None]:
    """Put a prefix before the message of an InputError; first remove `replaced` from the beginning of the message."""
    try:
        yield
    except InputError as error:
        raise InputError(prefix + str(error).removeprefix(replaced)) from error.__cause__


_warned: set[str] = set()


def warn_once(message: str) -> None:
    """Give a warning once per process."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=4)


def nearest(word: str, choices: Iterable[str], cutoff: float = 0.6) -> str:
    """A hint to append to a message: `; did you mean 'window'?`, or nothing if no choice is similar enough.

    Args:
        word, choices: the given word, and the known words.
        cutoff: the least similarity, from 0 to 1: the share of letters that two words have in the same order.
    """
    matches = difflib.get_close_matches(word[:LONGEST_VALUE], list(choices), n=1, cutoff=cutoff)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def plural(number: int, noun: str) -> str:
    """A count with its noun: `1 document`, `1,204 documents`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """A time in the largest unit that fits: `62 ms`, `45 s`, `3.2 h`, `2.1 days`."""
    units = ((86400, "days"), (3600, "h"), (60, "min"), (1, "s"), (1e-3, "ms"), (1e-6, "µs"))
    size, unit = next((entry for entry in units if seconds >= entry[0]), (1, "s"))
    number = seconds / size
    return f"{number:.1f} {unit}" if number < 9.95 else f"{number:,.0f} {unit}"


def listed(names: Sequence[str]) -> str:
    """One or more names as in a sentence: `a`, `a and b`, `a, b and c`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def shorten(text: str, length: int = LONGEST_VALUE) -> str:
    """The text, or its beginning and end with ` ... ` between them: at most `length` characters."""
    if len(text) <= length:
        return text
    half = (length - 5) // 2
    return f"{text[: length - 5 - half]} ... {text[-half:]}"


def shown(value: Any) -> str:
    """The repr of a value for a message: at most LONGEST_VALUE characters, however large the value is."""
    return shorten(_SHORT.repr(value))


class _Short(reprlib.Repr):
    """A repr that shows only the first few entries and levels of containers."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 3, LONGEST_VALUE, LONGEST_VALUE
        self.maxdict = self.maxlist = self.maxtuple = 4

    def repr_int(self, value: int, level: int) -> str:
        # Python refuses to write integers of more than 4300 digits.
        if value.bit_length() > 200:
            return f"an integer of {int(value.bit_length() * math.log10(2)) + 1} digits"
        return repr(value)


_SHORT = _Short()
