"""Reads files, YAML and JSON from users, with limits that no sensible input reaches.

Only plain YAML is read: texts, numbers, true, false, null, lists and sections with names. Aliases, other tags, repeated
names and several documents in a file are refused. 1e-3 is a number; 12:30 is a text.
`to_yaml` writes text that `parse_yaml` reads back.
"""

import codecs
import itertools
import json
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from multilin.errors import InputError, shorten, shown
from multilin.files import file_kind

MEGABYTE = 2**20
LARGEST_YAML = MEGABYTE
LARGEST_JSON = 2**27  # bytes of a tokenizer; the largest tokenizers in use have a third of this
_LARGEST_CONFIG = 16 * MEGABYTE
_CONFIGS = (
    *("config.json", "generation_config.json", "model.safetensors.index.json", "adapter_config.json"),
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
)
_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt")
_MOST_EVENTS, _DEEPEST, _MOST_DIGITS = 100_000, 50, 100


def check_regular(path: str | Path, name: str) -> None:
    """Refuse a path that is not a regular file. The path is not opened, since opening a pipe could never return.

    Args:
        path: path of the file.
        name: the setting or flag that gave the path; messages begin with it. Empty if the caller adds the name.

    Raises:
        InputError: there is no such file, or it is a folder, a device or a pipe.
    """
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{_subject(path, name)} cannot be read ({reason})") from None
    if not stat.S_ISREG(mode):
        raise InputError(f"{_subject(path, name)} is {file_kind(mode)}; give a regular file")


def _subject(path: str | Path, name: str) -> str:
    return f"{name}: {shorten(str(path))}" if name else shorten(str(path))


def read_bytes(path: str | Path, name: str, limit: int) -> bytes:
    """The content of a regular file of at most `limit` bytes.

    Raises:
        InputError: see `check_regular`; or the file cannot be read, or is larger than `limit`.
    """
    check_regular(path, name)
    try:
        # Some files of /proc would block forever before their first byte.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with open(descriptor, "rb") as stream:  # noqa: PTH123
            content = stream.read(limit + 1) or b""
    except OSError as error:
        raise InputError(f"{_subject(path, name)} cannot be read ({error.strerror or error})") from None
    if len(content) > limit:
        raise InputError(f"{_subject(path, name)} holds more than {limit // MEGABYTE} MB, the size limit")
    return content


def check_encoding(beginning: bytes, where: str) -> None:
    """Refuse a text that begins with a byte order mark or with zero bytes, as UTF-16 and UTF-32 do.

    Raises:
        InputError: the text has such a beginning. The message begins with `where`.
    """
    if b"\0" in beginning or beginning.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        is_wide = b"\0\0\0" in beginning or beginning.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE))
        raise InputError(f"{where} holds {'UTF-32' if is_wide else 'UTF-16'}, or no text; convert it to UTF-8")


def read_yaml(path: str | Path, name: str) -> Any:
    """The plain data in a YAML file. For arguments and errors, see `read_bytes` and `parse_yaml`."""
    return parse_yaml(_read_text(path, name, LARGEST_YAML), _subject(path, name))


def read_json(path: str | Path, name: str, limit: int = MEGABYTE) -> Any:
    """The plain data in a JSON file. For arguments and errors, see `read_bytes` and `parse_json`."""
    return parse_json(_read_text(path, name, limit), _subject(path, name))


def check_model_files(folder: Path, name: str) -> None:
    """Refuse a folder in Hugging Face's layout whose files cannot be opened or are too large for the memory.

    Raises:
        InputError: a file of the model or tokenizer is not regular, is too large, or is not valid JSON.
    """
    for path in sorted(folder.iterdir()):
        if path.name in _CONFIGS:
            if not isinstance(values := read_json(path, name, _LARGEST_CONFIG), dict):
                raise InputError(f"{_subject(path, name)} should hold a JSON object, not {shown(values)}")
        elif path.name in _VOCABULARIES or path.suffix in (".jinja", ".safetensors"):
            check_regular(path, name)
            if path.suffix != ".safetensors" and path.stat().st_size > LARGEST_JSON:
                megabytes = LARGEST_JSON // MEGABYTE
                raise InputError(f"{_subject(path, name)} holds more than {megabytes} MB, the size limit")


def _read_text(path: str | Path, name: str, limit: int) -> str:
    try:
        return read_bytes(path, name, limit).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{_subject(path, name)} is not UTF-8 (byte {error.start})") from None


def parse_json(text: str | bytes, where: str) -> Any:
    """The plain data of a JSON text. The caller must have checked the size of the text.

    Raises:
        InputError: the text is not JSON, has lists and objects in more than 50 levels, a name twice, nan, infinity, or
            an integer of more than 100 digits. The message begins with `where`.
    """
    try:
        value = json.loads(
            text, object_pairs_hook=unrepeated, parse_int=_integer, parse_float=_finite, parse_constant=_finite
        )
    except (ValueError, RecursionError) as error:
        reason = "too many levels" if isinstance(error, RecursionError) else shorten(str(error), 200)
        raise InputError(f"{where} is not JSON: {reason}") from None
    if _is_deep(value):
        raise InputError(f"{where}: lists and objects are nested in more than {_DEEPEST} levels")
    return value


def unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object from names and values; raises ValueError if a name occurs twice."""
    values = dict(pairs)
    if len(values) < len(pairs):
        ((repeated, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{shown(repeated)} occurs twice")
    return values


def _integer(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)


def _finite(digits: str) -> float:
    if not math.isfinite(value := float(digits)):
        raise ValueError(f"{shorten(digits)} is not a finite number")
    return value


def _is_deep(value: Any, levels: int = _DEEPEST) -> bool:
    if not isinstance(value, dict | list):
        return False
    return levels == 0 or any(
        _is_deep(part, levels - 1) for part in (value.values() if isinstance(value, dict) else value)
    )


def parse_yaml(text: str, where: str) -> Any:
    """The plain data of a YAML text of at most LARGEST_YAML characters.

    Raises:
        InputError: the text is not YAML, or is YAML that this module refuses. The message begins with `where`.
    """
    if len(text) > LARGEST_YAML:
        raise InputError(f"{where}: {len(text)} characters given, but YAML of at most {LARGEST_YAML} is read")
    try:
        return _build(text)
    except (yaml.YAMLError, UnicodeError, _Refused) as error:
        reason = shorten(" ".join(str(error).split()), 300)
        raise InputError(f"{where} cannot be read as YAML: {reason}") from None


def to_json(value: Any, **style: Any) -> str:
    """Plain data as JSON; nan and infinity, which JSON lacks, become null. `style` is passed to `json.dumps`."""
    try:
        return json.dumps(value, allow_nan=False, **style)
    except ValueError:
        finite = json.loads(json.dumps(value, **style), parse_constant=lambda name: None)
        return json.dumps(finite, **style)


def to_yaml(value: Any) -> str:
    """Plain data as YAML; the order of names is kept."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class _Refused(ValueError):
    """The error for YAML that is not plain."""


def _build(text: str) -> Any:
    """The value that the parser's events describe; each event is checked before a value is built from it."""
    events = zip(itertools.count(), yaml.parse(text, Loader=_PARSER))
    values = [_value(count, event, events, 1) for count, event in events if isinstance(event, yaml.NodeEvent)]
    if len(values) > 1:
        raise _Refused(f"{len(values)} documents given, separated by ---; give one")
    return values[0] if values else None


def _value(count: int, event: Any, events: Iterator[tuple[int, Any]], level: int) -> Any:
    """The number, text, list or section that begins with `event`, at the given depth of lists and sections."""
    place = f"line {event.start_mark.line + 1}"
    if count > _MOST_EVENTS or level > _DEEPEST:
        raise _Refused(f"{place} is beyond the limit of {_DEEPEST} levels and {_MOST_EVENTS:,} values")
    if isinstance(event, yaml.AliasEvent):
        raise _Refused(f"{place} repeats a value by an alias (*{shorten(str(event.anchor))}); write it out")
    if event.tag not in (None, "!", _TAG + "str"):
        raise _Refused(f"{place} has the tag {shorten(event.tag)}, but only plain data is read")
    if isinstance(event, yaml.ScalarEvent):
        return _scalar(event, place)
    parts = itertools.takewhile(lambda part: not isinstance(part[1], yaml.CollectionEndEvent), events)
    if isinstance(event, yaml.SequenceStartEvent):
        return [_value(*part, events, level + 1) for part in parts]
    section: dict[str, Any] = {}
    for part in parts:
        name, place = _value(*part, events, level + 1), f"line {part[1].start_mark.line + 1}"
        if not isinstance(name, str):
            raise _Refused(f"{place} has the name {shown(name)}, but names should be texts")
        if name in section:
            raise _Refused(f"{place} gives {shown(name)} a second time")
        section[name] = _value(*next(events), events, level + 1)
    return section


def _scalar(event: yaml.ScalarEvent, place: str) -> Any:
    text = str(event.value)
    kind = next((kind for kind, (pattern, _) in _PLAIN.items() if pattern.fullmatch(text)), None)
    if not event.implicit[0] or kind is None:
        return text
    if kind == "int" and len(text) > _MOST_DIGITS:
        raise _Refused(f"{place} holds an integer of {len(text)} digits")
    numeral = text.replace("_", "").replace(".inf", "inf").replace(".nan", "nan")
    if kind in ("null", "bool"):
        return {"true": True, "false": False}.get(text)
    return int(numeral) if kind == "int" else float(numeral)


_PARSER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TAG = "tag:yaml.org,2002:"
# Texts without quotes that are other values, and the characters that they begin with.
_PLAIN = {
    "null": (re.compile(r"~|null|"), ["~", "n", ""]),
    "bool": (re.compile(r"true|false"), ["t", "f"]),
    "int": (re.compile(r"[-+]?[0-9][0-9_]*"), list("-+0123456789")),
    "float": (
        re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan"),
        list("-+.0123456789"),
    ),
}


class _Dumper(yaml.SafeDumper):
    """Puts quotes around texts that YAML, or `parse_yaml`, would read as something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: _Dumper, text: str) -> Any:
    # Other styles write these as they are, and readers take them for line breaks.
    style = '"' if {"\x85", "\u2028", "\u2029"} & set(text) else None
    return dumper.represent_scalar(_TAG + "str", text, style=style)


_Dumper.add_representer(str, _represent_text)
for _kind, (_pattern, _first) in _PLAIN.items():
    _Dumper.add_implicit_resolver(_TAG + _kind, re.compile(f"(?:{_pattern.pattern})$"), _first)
