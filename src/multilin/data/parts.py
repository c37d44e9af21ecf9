"""A source cut into parts that processes read by themselves, each from any of its documents on."""

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multilin.data.corpora import (
    hub_dataset,
    hub_errors,
    hub_revision,
    is_built_in,
    is_hub,
    of_one_kind,
    read_documents,
    source_files,
    source_fingerprint,
)
from multilin.data.files import Document, EncodingErrors, read_file, row_document

if TYPE_CHECKING:
    from datasets import IterableDataset

PART_BYTES = 2**26
"""Bytes of files in a part, if the source can be cut there."""


@dataclass(frozen=True)
class Part:
    """The part of a source that one process reads at a time; a built-in corpus is one part.

    Attributes:
        files: names and paths, read one after the other.
        span: for a .jsonl file, the range of bytes in which the lines of the part begin.
        shard: for a hub dataset, number of the shard, number of shards, and commit of the repository.
    """

    files: tuple[tuple[str, str], ...] = ()
    span: tuple[int, int] | None = None
    shard: tuple[int, int, str | None] | None = None


def cut_source(source: str) -> tuple[list[Part], str]:
    """The parts of a source, in its order, and a hash that changes with its files or its revision.

    Lines of .jsonl are cut anywhere, small files are taken together, a hub dataset has the shards that it comes in.
    Other files, which cannot be read from their middle, are a part each.

    Raises:
        InputError: see `read_documents`.
    """
    if is_built_in(source):
        return [Part()], source
    if is_hub(source):
        revision, count = hub_revision(source), hub_dataset(source).num_shards
        identity = f"{revision or source_fingerprint(source)} {count}"
        return [Part(shard=(index, count, revision)) for index in range(count)], identity
    parts: list[Part] = []
    together: list[tuple[str, str]] = []  # small files of the part that is being filled
    digest, room = hashlib.sha256(), 0
    for name, path in source_files(source):
        status, entry = path.stat(), (name, str(path))
        digest.update(json.dumps([name, status.st_size, status.st_mtime_ns]).encode())
        is_cut = path.suffix.lower() == ".jsonl"
        if together and (is_cut or room <= 0 or status.st_size > room):
            parts.append(Part(tuple(together)))
            together = []
        if is_cut:
            cuts = range(0, status.st_size, PART_BYTES)
            parts += [Part((entry,), span) for span in itertools.pairwise([*cuts, status.st_size])]
        else:
            room = (room if together else PART_BYTES) - status.st_size
            together.append(entry)
    if together:
        parts.append(Part(tuple(together)))
    return parts, digest.hexdigest()


class PartReader:
    """The documents of a part, one after the other: `iter(reader)`.

    Args:
        source, text_field, encoding_errors: see `read_documents`.
        part: one of `cut_source`.
        position: where to begin: the result of `position()` after the last document that was read before.
    """

    def __init__(
        self, source: str, part: Part, text_field: str, encoding_errors: EncodingErrors, position: dict[str, Any]
    ) -> None:
        self._source, self._part, self._text_field, self._encoding_errors = source, part, text_field, encoding_errors
        self._done, self._state = int(position.get("documents", 0)), position.get("rows")
        self._left_out = Counter[str](position.get("left_out", {}))
        self._rows: IterableDataset | None = None

    def __iter__(self) -> Iterator[Document]:
        documents = self._file_documents() if self._part.shard is None else self._rows_of_shard()
        return of_one_kind(documents, self._source, self._left_out)

    def position(self) -> dict[str, Any]:
        """The place after the last document that was read, as plain data."""
        rows: dict[str, Any] = {} if self._rows is None else {"rows": self._rows.state_dict()}
        return {"documents": self._done, "left_out": dict(self._left_out), **rows}

    def _file_documents(self) -> Iterator[Document]:
        files = (
            read_file(Path(path), name, self._text_field, self._encoding_errors, self._part.span)
            for name, path in self._part.files
        )
        documents = itertools.chain.from_iterable(files) if self._part.files else read_documents(self._source)
        for document in itertools.islice(documents, self._done, None):
            self._done += 1
            yield document

    def _rows_of_shard(self) -> Iterator[Document]:
        assert self._part.shard is not None
        index, count, revision = self._part.shard
        rows = hub_dataset(self._source, revision).shard(num_shards=count, index=index)
        if self._state is not None:
            rows.load_state_dict(self._state)
        self._rows = rows
        with hub_errors(self._source):
            for row in rows:
                self._done += 1
                where = f"{self._source}: row {self._done} of shard {index}"
                yield row_document(row, f"{index}:{self._done}", self._text_field, where, self._encoding_errors)
