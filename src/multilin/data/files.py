"""Documents in one file: .txt .md .jsonl .csv .parquet, each also as .gz or .zst."""

import csv
import io
import json
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

from multilin.data.chat import CHAT_FIELDS, Message, read_messages
from multilin.errors import InputError, nearest, plural, shorten, shown
from multilin.settings.inputs import MEGABYTE, check_encoding, check_regular, unrepeated

if TYPE_CHECKING:
    from pyarrow import DataType

FORMATS = (".txt", ".md", ".jsonl", ".csv", ".parquet")
_WHOLE = (".txt", ".md")  # one document each
COMPRESSIONS = (".gz", ".zst")
SUPPORTED = f"{' '.join(FORMATS)}, each also with {' or '.join(COMPRESSIONS)}"

LONGEST_WORD = 2**23
LARGEST_DOCUMENT, LARGEST_LINE = 2**30, 2**26  # bytes that are held in memory at once
LARGEST_EXPANSION, SMALL = 250, 64 * MEGABYTE  # compressed text expands about tenfold

EncodingErrors = Literal["strict", "replace"]
_Rows = Iterator[tuple[str, str, Mapping[str, Any]]]  # the end of its name, the end of its place in messages, the row


@dataclass(frozen=True)
class Document:
    """One text, or one conversation."""

    name: str  # its place, relative to the source: `plays/hamlet.txt`, `rows.jsonl:17`
    text: str  # for a conversation, the text of its messages
    messages: list[Message] | None = None  # for a conversation
    is_null: bool = False  # its row has null instead of the text or a part of the conversation


def file_format(path: Path) -> str | None:
    """The format of a file, from its name (`.jsonl` for `rows.jsonl.gz`); None if it is not supported."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return suffixes[-1] if suffixes and suffixes[-1] in FORMATS else None


def check_file(path: Path) -> None:
    """Raise if a file is not a regular file, or is a text file of too many bytes, without opening the file.

    Raises:
        InputError: see `read_file`.
    """
    check_regular(path, "")
    if path.suffix.lower() in _WHOLE:
        _check_document(path, path.stat().st_size)


def _check_document(path: Path, size: int) -> None:
    if size > LARGEST_DOCUMENT:
        text = f"more than {LARGEST_DOCUMENT // MEGABYTE} MB in one document"
        raise InputError(f"{shorten(str(path))}: {text}; split the file, or turn it into lines of .jsonl")


def read_file(
    path: Path, name: str, text_field: str, encoding_errors: EncodingErrors, span: tuple[int, int] | None = None
) -> Iterator[Document]:
    """Yield the documents of one supported file; each is read when it is requested.

    A text file is one document, held in memory as a whole; a row of the other formats is one document.

    Args:
        path: path of the file.
        name: name of the file in the names of its documents.
        text_field, encoding_errors: see `read_documents`.
        span: for .jsonl, read only the lines that begin at a byte with span[0] <= byte < span[1].

    Raises:
        InputError: the file is not regular, cannot be read, or does not have the format that its name says; bytes are
            not UTF-8; a row lacks the field or has a field twice; there are more than 1 GB in a document, 64 MB in a
            line, or 8 million characters without a space; or compressed bytes expand more than text can.
    """
    suffix = file_format(path)
    with _opened(path) as stream:
        if suffix != ".parquet":
            check_encoding(stream.peek(), shorten(str(path)))
        if suffix in _WHOLE:
            content = stream.read(LARGEST_DOCUMENT + 1)
            _check_document(path, len(content))
            text = _decode(content, path, 0, encoding_errors).removeprefix("\ufeff")  # a byte-order mark
            _check_words(text, str(path))
            yield Document(name, text)
            return
        if suffix == ".parquet":
            rows = _parquet_rows(stream, path, text_field)
        elif suffix == ".csv":
            rows = _csv_rows(stream, path, encoding_errors)
        else:
            rows = _json_rows(stream, path, encoding_errors, span or (0, sys.maxsize))
        for number, place, row in rows:
            yield row_document(row, f"{name}{number}", text_field, f"{path}{place}", encoding_errors)


def row_document(
    row: Mapping[str, Any], name: str, text_field: str, where: str, encoding_errors: EncodingErrors
) -> Document:
    """The text in a row's field, or the conversation in a row without this field.

    Raises:
        InputError: the row has no text and no conversation (the message lists the row's fields), or the field holds no
            UTF-8 text; also see `read_messages`.
    """
    fields = [text_field] if text_field in row else CHAT_FIELDS
    values = {field: _decoded(row[field], encoding_errors, where, field) for field in fields if field in row}
    messages = None
    if text_field in values:
        text = values[text_field]
        if text is None:
            return Document(name, "", is_null=True)
        if not isinstance(text, str):
            raise InputError(f"{where}: field {text_field!r} holds {shown(text)}, but it should hold a text")
    elif (messages := read_messages(values, where)) is not None:
        text = "\n\n".join(message["content"] for message in messages)
    else:
        given, hint = shorten(", ".join(map(str, row)), 200), nearest(text_field, row)
        raise InputError(f"{where}: no field {shown(text_field)} (text_field); the row has {given}{hint}")
    _check_words(text, where)
    return Document(name, text, messages, is_null=messages == [])


def _decoded(value: Any, encoding_errors: EncodingErrors, where: str, field: str, levels: int = 2) -> Any:
    """Decode bytes from Parquet in a text or messages; refuse or replace half surrogate pairs from JSON."""
    if levels and isinstance(value, list):
        return [_decoded(part, encoding_errors, where, field, levels - 1) for part in value]
    if levels and isinstance(value, dict):
        return {name: _decoded(part, encoding_errors, where, field, levels - 1) for name, part in value.items()}
    try:
        if isinstance(value, bytes):
            return value.decode("utf-8", encoding_errors)
        if isinstance(value, str):
            value.encode()
    except UnicodeDecodeError as error:
        fault = f"byte {error.start} of field {field!r} is not UTF-8"
    except UnicodeEncodeError as error:
        if encoding_errors == "replace":
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        fault = f"character {error.start} of field {field!r} is half a surrogate pair"
    else:
        return value
    raise InputError(f"{where}: {fault}; correct it, or set encoding_errors to replace")


def _check_words(text: str, where: str) -> None:
    """Raise for very long words, since a tokenizer needs about 100 bytes of memory per character of a word."""
    start = 0  # of a word
    while len(text) - start > LONGEST_WORD:
        piece = text[start : start + LONGEST_WORD + 1]
        last = "" if piece[-1].isspace() else piece.rsplit(maxsplit=1)[-1]
        if len(last) == len(piece):
            raise InputError(f"{where}: more than {LONGEST_WORD:,} characters without a space between them")
        start += len(piece) - len(last)


@contextmanager
def _opened(path: Path) -> Iterator[io.BufferedReader]:
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
        reason = error.strerror or shorten(" ".join(str(error).split()), 200)  # Arrow's messages have several lines
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
        offset += len(stream.readline(LARGEST_LINE + 1)) - 1  # skips the rest of a line that begins before
    while offset < end and (line := stream.readline(LARGEST_LINE + 1)):
        if len(line) > LARGEST_LINE:
            megabytes = LARGEST_LINE // MEGABYTE
            raise InputError(f"{shorten(str(path))}: a line of more than {megabytes} MB, from byte {offset} on")
        text = _decode(line, path, offset, encoding_errors)
        yield text.removeprefix("\ufeff") if offset == 0 else text
        offset += len(line)


# NaN, which pandas writes for a missing cell, is null.
_JSON = json.JSONDecoder(object_pairs_hook=unrepeated, parse_constant=lambda name: None)


def _json_rows(stream: IO[bytes], path: Path, encoding_errors: EncodingErrors, span: tuple[int, int]) -> _Rows:
    after = f" (after byte {span[0]})" if span[0] else ""
    for number, line in enumerate(_lines(stream, path, encoding_errors, span), start=1):
        place = f":{number}{after}"
        if not line.strip():
            continue
        try:
            row = _JSON.decode(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}{place}: not a line of JSON ({shorten(str(error), 200)})") from None
        if not isinstance(row, dict):
            raise InputError(f"{path}{place}: a line should be a JSON object with a field of text, not {shown(row)}")
        yield place, place, row


def _csv_rows(stream: IO[bytes], path: Path, encoding_errors: EncodingErrors) -> _Rows:
    csv.field_size_limit(LARGEST_LINE)  # the default refuses documents over 128 kB
    reader = csv.reader(_lines(stream, path, encoding_errors), strict=True)
    header: list[str] = []
    number, place = 0, ": line 1"
    try:
        for cells in reader:
            if header and cells:
                number += 1
                if len(cells) != len(header):
                    sizes = f"{plural(len(cells), 'cell')}, but the header has {len(header)}"
                    raise InputError(
                        f"{path}{place} has {sizes}; put quotes around a text with a comma or a line break"
                    )
                yield f":{number}", place, {name: cell or None for name, cell in zip(header, cells, strict=True)}
            elif cells:
                _check_names(cells, f"{path}{place}")
                header = cells
            place = f": line {reader.line_num + 1}"
    except csv.Error as error:
        reason = str(error).partition(" - ")[0]  # what follows is advice for Python's open()
        raise InputError(f"{path}{place} is not CSV ({reason})") from None


def _check_names(names: Sequence[str], where: str) -> None:
    """Raise if several columns or fields have the same name, since only the last of these would be read."""
    if repeated := [name for name, count in Counter(names).items() if count > 1 and name]:
        raise InputError(f"{where}: the column or field {shown(repeated[0])} occurs twice; rename one")


def _parquet_rows(stream: IO[bytes], path: Path, text_field: str) -> _Rows:
    """The rows of a Parquet file, with texts as bytes."""
    import pyarrow
    import pyarrow.parquet

    try:
        with _seekable(stream) as source, pyarrow.parquet.ParquetFile(source) as file:
            names, number = file.schema_arrow.names, 0
            _check_names(names, str(path))
            columns = [name for name in names if name in (text_field, *CHAT_FIELDS)]
            if not columns:  # so that the message for this row lists the columns
                yield "", "", dict.fromkeys(names)
            for batch in file.iter_batches(batch_size=256, columns=[text_field] if text_field in columns else columns):
                kinds = [field.with_type(_with_bytes(field.type, str(path))) for field in batch.schema]
                for row in batch.cast(pyarrow.schema(kinds)).to_pylist():
                    number += 1
                    yield f":{number}", f":{number}", row
    except InputError:
        raise
    except (pyarrow.ArrowException, ValueError) as error:
        raise InputError(f"{path}: not a Parquet file ({shorten(' '.join(str(error).split()), 200)})") from None


def _with_bytes(kind: "DataType", where: str) -> "DataType":
    """An Arrow type with text types replaced by bytes types, since texts in a file may not be UTF-8."""
    import pyarrow
    from pyarrow import types

    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return pyarrow.large_binary()
    if types.is_dictionary(kind):
        return _with_bytes(kind.value_type, where)
    if types.is_struct(kind):
        _check_names([field.name for field in kind], where)
        return pyarrow.struct([field.with_type(_with_bytes(field.type, where)) for field in kind])
    if types.is_nested(kind) and not types.is_map(kind):
        return pyarrow.large_list(_with_bytes(kind.value_type, where))
    return kind


@contextmanager
def _seekable(stream: IO[bytes]) -> Iterator[IO[bytes]]:
    """The stream if it can be read from the end, as Parquet needs; otherwise a temporary file with its content."""
    if stream.seekable():
        yield stream
    else:
        with tempfile.TemporaryFile() as copy:
            shutil.copyfileobj(stream, copy, 2**20)
            copy.seek(0)
            yield copy
