"""Documents in one file: .txt .md .jsonl .csv .parquet, each also as .gz or .zst."""

import csv
import io
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from multilin.data.chat import Message, read_messages
from multilin.errors import InputError, nearest, shorten, shown
from multilin.settings.inputs import MEGABYTE, check_regular

FORMATS = (".txt", ".md", ".jsonl", ".csv", ".parquet")
_WHOLE = (".txt", ".md")  # one document each
COMPRESSIONS = (".gz", ".zst")
SUPPORTED = f"{' '.join(FORMATS)}, each also with {' or '.join(COMPRESSIONS)}"

LONGEST_WORD, _SPACE = 2**23, re.compile(r"\s")
LARGEST_DOCUMENT, LARGEST_LINE = 2**30, 2**26  # bytes that are held in memory at once
LARGEST_EXPANSION, SMALL = 250, 64 * MEGABYTE  # compressed text expands about tenfold

EncodingErrors = Literal["strict", "replace"]
_Rows = Iterator[tuple[int, Mapping[str, Any]]]  # each with its number, from 1


@dataclass(frozen=True)
class Document:
    """One text, or one conversation."""

    name: str  # its place, relative to the source: `plays/hamlet.txt`, `rows.jsonl:17`
    text: str  # for a conversation, the text of its messages
    messages: list[Message] | None = None  # for a conversation


def file_format(path: Path) -> str | None:
    """The format by a file's name (`.jsonl` for `rows.jsonl.gz`), or None if it is not supported."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return suffixes[-1] if suffixes and suffixes[-1] in FORMATS else None


def check_file(path: Path) -> None:
    """Refuse, before it is opened, a file that is no regular file, or that is one text of too many bytes.

    Raises:
        InputError: see `read_file`.
    """
    check_regular(path, "")
    if path.suffix.lower() in _WHOLE:
        _check_document(path, path.stat().st_size)


def _check_document(path: Path, size: int) -> None:
    if size > LARGEST_DOCUMENT:
        raise InputError(
            f"{shorten(str(path))}: more than {LARGEST_DOCUMENT // MEGABYTE} MB in one document; split it, or make it "
            "lines of .jsonl"
        )


def read_file(
    path: Path, name: str, text_field: str, encoding_errors: EncodingErrors, span: tuple[int, int] | None = None
) -> Iterator[Document]:
    """The documents of one supported file, read as they are asked for.

    A text file is one document, held in memory as a whole; a row of the other formats is one document.

    Args:
        path: path of the file.
        name: name of the file in the names of its documents.
        text_field, encoding_errors: see `read_documents`.
        span: for .jsonl, read only the lines whose first byte is at span[0] <= byte < span[1].

    Raises:
        InputError: bytes that are not UTF-8 or not of the format in the name, rows without the field, a file that is
            not regular or cannot be read, more than 1 GB in a document or 64 MB in a line, 8 million characters
            without a space, or compressed bytes that expand as no text does.
    """
    suffix = file_format(path)
    with _opened(path) as stream:
        if suffix in _WHOLE:
            content = stream.read(LARGEST_DOCUMENT + 1)
            _check_document(path, len(content))
            text = _decode(content, path, 0, encoding_errors).removeprefix("\ufeff")  # a byte-order mark
            _check_words(text, str(path))
            yield Document(name, text)
            return
        if suffix == ".parquet":
            rows = _parquet_rows(stream, path, text_field, encoding_errors)
        elif suffix == ".csv":
            rows = _csv_rows(stream, path, encoding_errors)
        else:
            rows = _json_rows(stream, path, encoding_errors, span or (0, sys.maxsize))
        after = f" (after byte {span[0]})" if span is not None and span[0] else ""
        for number, row in rows:
            yield row_document(row, f"{name}:{number}{after}", text_field, f"{path}:{number}{after}", encoding_errors)


def row_document(
    row: Mapping[str, Any], name: str, text_field: str, where: str, encoding_errors: EncodingErrors
) -> Document:
    """The text in a row's field, or the conversation in a row without this field.

    Raises:
        InputError: the row has neither (the message has its fields), or the field holds no text of UTF-8; or as
            `read_messages`.
    """
    if text_field not in row:
        if (messages := read_messages(row, where)) is not None:
            return Document(name, "\n\n".join(message["content"] for message in messages), messages)
        hint = nearest(text_field, row)
        fields = shorten(", ".join(map(str, row)), 200)
        raise InputError(f"{where}: no field {shown(text_field)} (text_field); the row has {fields}{hint}")
    text = row[text_field]
    if not isinstance(text, str):
        raise InputError(f"{where}: field {text_field!r} holds {shown(text)}, but it should hold a text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        # JSON can spell half of a surrogate pair, which is no character.
        if encoding_errors == "strict":
            raise InputError(
                f"{where}: character {error.start} of field {text_field!r} is half a surrogate pair; correct it, or "
                "set encoding_errors to replace"
            ) from None
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    _check_words(text, where)
    return Document(name, text)


def _check_words(text: str, where: str) -> None:
    """Refuse very long words: a tokenizer takes a hundred bytes of memory for each character of a word."""
    for start in range(0, len(text) - LONGEST_WORD, LONGEST_WORD):
        if _SPACE.search(text, start, start + LONGEST_WORD) is None:
            raise InputError(f"{where}: more than {LONGEST_WORD:,} characters without a space between them")


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    compression = {".gz": "gzip", ".zst": "zstd"}.get(path.suffix.lower())
    try:
        if compression is None:
            with path.open("rb") as stream:
                yield stream
        else:
            import pyarrow

            # Unlike zstandard's own reader, pyarrow's notices a file that was cut off.
            with pyarrow.input_stream(path, compression=compression) as expanded:
                limit = SMALL + LARGEST_EXPANSION * path.stat().st_size
                yield io.BufferedReader(_Bounded(expanded, limit, path), MEGABYTE)
    except OSError as error:
        reason = error.strerror or shorten(" ".join(str(error).split()), 200)  # Arrow's have several lines
        raise InputError(f"{path}: cannot be read ({reason})") from None


class _Bounded(io.RawIOBase):
    """A stream that refuses to give more than `limit` bytes."""

    def __init__(self, stream: Any, limit: int, path: Path) -> None:
        self.stream, self.left, self.path = stream, limit, path

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = self.stream.read(len(buffer))
        self.left -= len(content)
        if self.left < 0:
            times = f"{LARGEST_EXPANSION} times its size, which no text does"
            raise InputError(f"{shorten(str(self.path))}: expands to more than {times}")
        buffer[: len(content)] = content
        return len(content)


def _decode(content: bytes, path: Path, offset: int, encoding_errors: EncodingErrors) -> str:
    try:
        return content.decode("utf-8", encoding_errors)
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: byte {offset + error.start} is not UTF-8; convert the file, or set encoding_errors to replace"
        ) from None


def _lines(
    stream: IO[bytes], path: Path, encoding_errors: EncodingErrors, span: tuple[int, int] = (0, sys.maxsize)
) -> Iterator[str]:
    offset, end = span
    if offset:
        stream.seek(offset - 1)
        offset += len(stream.readline(LARGEST_LINE + 1)) - 1  # the rest of a line that begins before
    while offset < end and (line := stream.readline(LARGEST_LINE + 1)):
        if len(line) > LARGEST_LINE:
            megabytes = LARGEST_LINE // MEGABYTE
            raise InputError(f"{shorten(str(path))}: a line of more than {megabytes} MB, from byte {offset} on")
        text = _decode(line, path, offset, encoding_errors)
        yield text.removeprefix("\ufeff") if offset == 0 else text
        offset += len(line)


def _json_rows(stream: IO[bytes], path: Path, encoding_errors: EncodingErrors, span: tuple[int, int]) -> _Rows:
    for number, line in enumerate(_lines(stream, path, encoding_errors, span), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}:{number}: not a line of JSON ({shorten(str(error), 200)})") from None
        if not isinstance(row, dict):
            raise InputError(f"{path}:{number}: a line should be a JSON object with a field of text, not {shown(row)}")
        yield number, row


def _csv_rows(stream: IO[bytes], path: Path, encoding_errors: EncodingErrors) -> _Rows:
    csv.field_size_limit(LARGEST_LINE)  # the default refuses documents over 128 kB
    reader = csv.DictReader(_lines(stream, path, encoding_errors), restkey="(cells beyond the header)", strict=True)
    try:
        yield from enumerate(reader, start=1)
    except csv.Error as error:
        raise InputError(f"{path}: line {reader.line_num} is not CSV ({error})") from None


def _parquet_rows(stream: IO[bytes], path: Path, text_field: str, encoding_errors: EncodingErrors) -> _Rows:
    import pyarrow
    import pyarrow.parquet

    try:
        with _seekable(stream) as source, pyarrow.parquet.ParquetFile(source) as file:
            names, number = file.schema_arrow.names, 0
            columns = [text_field] if text_field in names else names
            for batch in file.iter_batches(batch_size=256, columns=columns):
                for index, field in enumerate(batch.schema if encoding_errors == "replace" else ()):
                    column = batch.column(index)
                    if pyarrow.types.is_dictionary(column.type):
                        column = column.dictionary_decode()
                    if pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type):
                        contents = column.cast(pyarrow.large_binary()).to_pylist()
                        texts = [None if content is None else content.decode(errors="replace") for content in contents]
                        batch = batch.set_column(index, field.name, pyarrow.array(texts, pyarrow.large_string()))
                yield from enumerate(batch.to_pylist(), start=number + 1)
                number += batch.num_rows
    except UnicodeDecodeError:
        raise InputError(f"{path}: a text is not UTF-8; convert the file, or set encoding_errors to replace") from None
    except pyarrow.ArrowInvalid as error:
        raise InputError(f"{path}: not a Parquet file ({shorten(' '.join(str(error).split()), 200)})") from None


@contextmanager
def _seekable(stream: IO[bytes]) -> Iterator[IO[bytes]]:
    """The stream itself, or a temporary file with its content: Parquet is read from its end."""
    if stream.seekable():
        yield stream
    else:
        with tempfile.TemporaryFile() as copy:
            shutil.copyfileobj(stream, copy, 2**20)
            copy.seek(0)
            yield copy
