"""Malformed values of a type, and damage to files: any file, JSON, YAML, safetensors."""

import dataclasses
import json
import math
import os
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from safetensors.torch import load_file, save_file

from multilin.settings.bounds import LONGEST_TEXT

Damage = Callable[[Path], object]

BOMB = "a: &a [x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join(['*' + a] * 9)}]\n" for a, b in zip("abcdefghi", "bcdefghij", strict=True)
)
HUGE = 10**400
VALUES: list[Any] = [-1, 0, 1.5, 10**30, HUGE, 1e300, math.nan, math.inf, -math.inf, True, "nonsense", "", "x" * 5000]
VALUES += ["a\0b", None, [], [1], [None], {}, {"nonsense": 1}, [[]], {"a": {"b": [{}] * 3}}]


def bad_values(hint: Any) -> list[Any]:
    """Values that a type refuses, of those around its bounds and those that few types take."""
    bounds = [dataclasses.astuple(bound)[0] for bound in _metadata(hint) if type(bound).__module__ == "annotated_types"]
    edges = [value for n in bounds for value in (n, n - 1, n + 1, n * 10, ["1"] * int(n % 2**17 + 1))]
    config = ConfigDict(allow_inf_nan=False, str_max_length=LONGEST_TEXT)
    adapter: TypeAdapter[Any] = TypeAdapter(hint, config=None if dataclasses.is_dataclass(hint) else config)
    return [value for value in [*edges, *VALUES] if not _accepts(adapter, value)]


def _metadata(hint: Any) -> Iterator[Any]:
    yield from getattr(hint, "__metadata__", ())
    for part in get_args(hint):
        yield from _metadata(part)


def _accepts(adapter: TypeAdapter[Any], value: Any) -> bool:
    try:
        adapter.validate_python(value)
    except ValidationError:
        return False
    return True


def plain(value: Any) -> str:
    """A value as JSON, or as YAML where JSON has no word for it."""
    text = "1" * 400 if value is HUGE else json.dumps(value)
    return text.replace("-Infinity", "-.inf").replace("Infinity", ".inf").replace("NaN", ".nan")


def some(values: Any, number: int, seed: str) -> list[Any]:
    """So many of them, the same at every call."""
    values = list(values)
    return random.Random(seed).sample(values, min(number, len(values)))


def replaced(content: bytes | str) -> Damage:
    """Another content."""
    return lambda path: path.write_bytes(content if isinstance(content, bytes) else content.encode())


def cut(share: float) -> Damage:
    """The beginning only."""
    return lambda path: path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])


def flipped(path: Path) -> None:
    """One bit is another."""
    content = bytearray(path.read_bytes())
    place = random.Random(path.name).randrange(8 * len(content))
    content[place // 8] ^= 1 << place % 8
    path.write_bytes(content)


def turned_into(make: Damage) -> Damage:
    """Something else at its place."""
    return lambda path: (path.unlink(missing_ok=True), make(path))


ANY: dict[str, Damage] = {
    "empty": replaced(b""), "cut": cut(0.5), "nearly whole": cut(0.97), "binary": replaced(bytes(range(256)) * 4),
    "missing": turned_into(lambda path: None), "a folder": turned_into(Path.mkdir), "a pipe": turned_into(os.mkfifo),
    "a loop": turned_into(lambda path: path.symlink_to(path.name)),
    "a device": turned_into(lambda path: path.symlink_to("/dev/zero")),
    "the memory": turned_into(lambda path: path.symlink_to("/proc/self/mem")),
}  # fmt: skip
"""What no reader of any format can accept."""

_NO_JSON = ["[]", "null", "3", '"x"', "[[" * 50_000, '{"a": 1, "a": 2}', '{"a": NaN}', "{'a': 1}", "{}x"]
_NO_JSON += ['{"a": ' + "9" * 5000 + "}"]
JSON = ANY | {text[:16]: replaced(text) for text in [*_NO_JSON, '{"a": 1}'.encode("utf-16"), b'{"\xe9": 1}']}

_NO_YAML: list[str | bytes] = [
    BOMB, "[" * 100_000, "a:\n" + "".join(" " * depth + "- \n" for depth in range(1, 300)), "model: {a: !!set {b}}",
    "!!python/object/apply:os.system [ls]", "model: 1\nmodel: 2", "a: 1\n---\na: 2", "training: {seed: " + "9" * 9000,
    "model: [", 'output: "a', "\ta: 1", "a: \x00", "3: 4", "? [a]\n: 3", "- a\n- b", "42", "nonsense: 1", "model: 3",
    "training: [1]", "<<: {output: a}", "x" * 2**21, "a: *b", "%YAML 9.9\n---\na: 1", b"output: caf\xe9", "@", "`",
    "output: a".encode("utf-16"), "model: {nonsense: 1}", "model: &a {b: *a}", "{", "}", "null: 3", "''",
]  # fmt: skip
YAML = ANY | {str(text)[:16]: replaced(text) for text in _NO_YAML}


def with_field(place: tuple[Any, ...], value: Any) -> Damage:
    """JSON with another value at a place; without it where the value is `...`."""

    def damage(path: Path) -> None:
        inner = content = json.loads(path.read_text())
        for name in place[:-1]:
            inner = inner[name]
        if value is ...:
            del inner[place[-1]]
        else:
            inner[place[-1]] = "HUGE" if value is HUGE else value
        path.write_text(json.dumps(content).replace('"HUGE"', "1" * 400))

    return damage


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where the values in plain data are; of lists the first entries only."""
    if place:
        yield place
    entries = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for name, inner in entries:
        yield from places(inner, (*place, name))


def filled(value: float) -> Damage:
    """A safetensors file whose tensors hold one value everywhere."""

    def damage(path: Path) -> None:
        save_file(
            {name: torch.full_like(tensor, value) for name, tensor in load_file(path).items()}, path, {"format": "pt"}
        )

    return damage


def _header(change: Callable[[dict[str, Any], str], object], extra: bytes = b"") -> Damage:
    """A safetensors file whose header was changed: called with it and the name of a tensor."""

    def damage(path: Path) -> None:
        content = path.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        change(header, max(name for name in header if name != "__metadata__"))
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :] + extra)

    return damage


def _entry(field: str, value: Any) -> Damage:
    return _header(lambda header, name: header[name].update({field: value}))


def _length(length: int) -> Damage:
    return lambda path: path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])


_ENTRIES = [("shape", value) for value in ([1], [-1], [2**62, 2**62], "x", None, [0])]
_ENTRIES += [("dtype", value) for value in ("I64", "F4", 3)]
_ENTRIES += [("data_offsets", value) for value in ([0, 2**62], [-4, 0], [4, 0], [])]
TENSORS = ANY | {
    **{f"header of {length} bytes": _length(length) for length in (0, 1, 2**20, 2**40, 2**63, 2**64 - 1)},
    **{f"{field} {value}": _entry(field, value) for field, value in _ENTRIES},
    "a header that is a list": replaced(struct.pack("<Q", 2) + b"[]"),
    "a deep header": replaced(struct.pack("<Q", 10**5) + b"[" * 10**5),
    "bytes left over": _header(lambda header, name: None, b"x"),
    "no tensors": _header(lambda header, name: header.clear()),
    "a tensor missing": _header(lambda header, name: header.pop(name)),
    "another name": _header(lambda header, name: header.update(nonsense=header.pop(name))),
}
