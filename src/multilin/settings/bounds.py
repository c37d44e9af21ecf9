"""Bounds of settings: smallest and largest values of numbers, and largest lengths of texts and lists.

The largest values exceed any sensible use of a field, so that a mistyped value is refused in one sentence.
`multilin.model.memory` checks whether a model within these bounds fits into the memory.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import AfterValidator, BeforeValidator
from pydantic_core import PydanticCustomError

from multilin.errors import shown

LONGEST_TEXT = 4096  # characters of a text without another bound
MOST_LAYERS, MOST_STEPS, LARGEST_WINDOW = 512, 10**8, 2**17
_LONGEST_NAME = 255  # bytes of a name in a file system
_MOST_VALUES, _DEEPEST = 10_000, 12  # values and levels of a section with free entries


def _refuse_bool(value: Any) -> Any:
    # Python counts True as 1.
    if isinstance(value, bool | bytes):
        raise PydanticCustomError("number_type", "Input should be a number")
    return value


_NUMBER = BeforeValidator(_refuse_bool)

Width = Annotated[int, _NUMBER, Ge(1), Le(2**16)]  # numbers in a vector
Multiple = Annotated[int, _NUMBER, Ge(1), Le(2**12)]  # number of heads, or a width as a multiple of another width
Depth = Annotated[int, _NUMBER, Ge(1), Le(MOST_LAYERS)]  # layers
Length = Annotated[int, _NUMBER, Ge(1), Le(2**20)]  # tokens of a text that is read as a whole
ShortLength = Annotated[int, _NUMBER, Ge(1), Le(2**12)]  # tokens of a text whose pairs are all looked at
BlockLength = Annotated[int, _NUMBER, Ge(2), Le(2**20)]  # tokens of a text of which at least one is predicted
Window = Annotated[int, _NUMBER, Ge(1), Le(LARGEST_WINDOW)]  # tokens read, the current one included
LayerWindows = Annotated[tuple[Window | None, ...], MaxLen(MOST_LAYERS)]
"""The window of each layer; a layer with the window None reads the whole past."""
PastWindow = Annotated[int, _NUMBER, Ge(0), Le(LARGEST_WINDOW)]  # tokens read before the current one
Vocabulary = Annotated[int, _NUMBER, Ge(1), Le(2**20)]  # number of tokens
TokenId = Annotated[int, _NUMBER, Ge(0), Lt(2**20)]  # one token
Count = Annotated[int, _NUMBER, Ge(1), Le(2**16)]  # number of things of one kind
Choices = Annotated[int, _NUMBER, Ge(2), Le(2**16)]  # number of different things to choose from
Batch = Annotated[int, _NUMBER, Ge(1), Le(2**14)]  # number of texts at a time
Blocks = Annotated[int, _NUMBER, Ge(1), Le(2**26)]  # blocks of training text read for one step
Beams = Annotated[int, _NUMBER, Ge(1), Le(2**10)]  # texts that beam search keeps
Steps = Annotated[int, _NUMBER, Ge(1), Le(MOST_STEPS)]  # steps of an optimizer, or other steps in a row
StepCount = Annotated[int, _NUMBER, Ge(0), Le(MOST_STEPS)]  # steps, or 0
Tokens = Annotated[int, _NUMBER, Ge(1), Le(10**12)]  # tokens of a whole corpus
Size = Annotated[int, _NUMBER, Ge(0), Le(10**18)]  # bytes or tokens of a whole corpus, or 0
Index = Annotated[int, _NUMBER, Ge(0), Le(10**9)]  # place in a list, from 0
Repeats = Annotated[int, _NUMBER, Ge(1), Le(100)]  # runs of a row, or other things done a few times
RepeatCount = Annotated[int, _NUMBER, Ge(0), Le(100)]  # repeats, or 0
Port = Annotated[int, _NUMBER, Ge(0), Le(2**16 - 1)]  # port of TCP; 0 lets the system choose
Seed = Annotated[int, _NUMBER, Ge(0), Lt(2**32)]  # seed of random numbers of Python, NumPy and PyTorch

Rate = Annotated[float, _NUMBER, Gt(0), Le(1e3)]  # a learning rate, or a factor of a learning rate
Strength = Annotated[float, _NUMBER, Ge(0), Le(1e6)]  # a factor that may be 0
Factor = Annotated[float, _NUMBER, Ge(-1e6), Le(1e6)]  # a factor of either sign
Positive = Annotated[float, _NUMBER, Ge(1e-15), Le(1e9)]  # above 0
Fraction = Annotated[float, _NUMBER, Ge(0), Lt(1)]  # at least 0 and below 1
Part = Annotated[float, _NUMBER, Gt(0), Lt(1)]  # above 0 and below 1
Share = Annotated[float, _NUMBER, Gt(0), Le(1)]  # above 0 and at most 1
Temperature = Annotated[float, _NUMBER, Ge(0), Le(1e3)]  # divisor of logits; 0 takes the likeliest token
Minutes = Annotated[float, _NUMBER, Ge(0.1), Le(1e6)]  # duration of a run
Amount = Annotated[float, _NUMBER, Gt(0), Le(1e30)]  # tokens, operations or seconds to spend


def _check_path(value: str) -> str:
    if not value:
        raise ValueError("an empty text given, but it should be the name of a file or folder")
    if "\0" in value:
        raise ValueError("a name with a null character given, but names of files and folders have none")
    if value.startswith("~/"):  # a shell does not replace it in --flag=~/x, nor does YAML
        value = str(Path.home() / value[2:])
    longest = max(len(name.encode(errors="replace")) for name in value.split("/"))
    if longest > _LONGEST_NAME:
        raise ValueError(f"a name of {longest} bytes given, but names have at most {_LONGEST_NAME}")
    return value


PathText = Annotated[str, AfterValidator(_check_path)]
"""Path of a file or folder, or a name that is looked up, such as a name on the hub."""
Names = Annotated[list[PathText], MaxLen(100)]  # several paths or names
Mixture = Annotated[dict[PathText, Positive], MinLen(1), MaxLen(100)]  # several paths or names, each with a weight
Name = Annotated[str, MaxLen(100)]  # name of a field, a row or a task
Prose = Annotated[str, MaxLen(2**20)]  # text for a model to read, as a command line takes it


def _check_plain(section: Mapping[str, Any]) -> Any:
    """Refuse values that are not plain data, and too many values. No recursion is used, since it could be too deep."""
    rest: list[tuple[Any, int]] = [(section, 1)]
    for _ in range(_MOST_VALUES):
        if not rest:
            return section
        value, depth = rest.pop()
        if depth > _DEEPEST:
            raise ValueError(f"lists and sections are nested in more than {_DEEPEST} levels")
        if isinstance(value, Mapping):
            if any(not isinstance(name, str) or len(name) > LONGEST_TEXT for name in value):
                raise ValueError(f"names of fields should be texts of at most {LONGEST_TEXT} characters")
            rest += [(part, depth + 1) for part in value.values()]
        elif isinstance(value, list | tuple):
            rest += [(part, depth + 1) for part in value]
        elif isinstance(value, str) and len(value) > LONGEST_TEXT:
            raise ValueError(f"a text of {len(value)} characters given, but at most {LONGEST_TEXT} are accepted")
        elif isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{value} given, but numbers should be finite")
        elif not isinstance(value, str | int | float | None):
            raise ValueError(f"{shown(value)} given, but values should be numbers, texts, lists or sections")
    raise ValueError(f"more than {_MOST_VALUES} values given")


MatchLength = Annotated[int, _NUMBER, Ge(1), Le(64)]  # tokens of the longest match
Section = Annotated[dict[str, Any], MaxLen(1000), AfterValidator(_check_plain)]
"""A section whose fields are checked by another class of settings."""
LayerList = Annotated[list[Section], MaxLen(MOST_LAYERS)]  # a section for each layer
Tried = Annotated[list[Any], MinLen(1), MaxLen(100)]  # values of one field to try
