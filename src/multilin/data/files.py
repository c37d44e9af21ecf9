"""Documents in one file: .txt .md .jsonl .csv .parquet, each also as .gz or .zst."""

import csv
import io
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from multilin.errors import InputError, nearest

FORMATS = (".txt", ".md", ".jsonl", ".csv", ".parquet")
COMPRESSIONS = (".gz", ".zst")
SUPPORTED = f"{' '.join(FORMATS)}, each also with {' or '.join(COMPRESSIONS)}"

EncodingErrors = Literal["strict", "replace"]


@dataclass(frozen=True)
class Document:
    """One text, read from its start without knowing any other."""

    name: str  # where it came from, relative to the source: `plays/hamlet.txt`, `rows.jsonl:17`
    text: str


def file_format(path: Path) -> str | None:
    """The format a file's name claims (`.jsonl` for `rows.jsonl.gz`), or None when it is not supported."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return suffixes[-1] if suffixes and suffixes[-1] in FORMATS else None


def read_file(path: Path, name: str, text_field: str, encoding_errors: EncodingErrors) -> Iterator[Document]:
    """The documents of one supported file, read as they are asked for.

    A text file is one document, held in memory as a whole; a row of the other formats is one document.

    Raises:
        InputError: bytes that are not UTF-8 or not what the name claims, rows without the field, an unreadable file.
    """
    suffix = file_format(path)
    with _opened(path) as stream:
        if suffix in (".txt", ".md"):
            yield Document(name, _decode(stream.read(), path, 0, encoding_errors))
            return
        if suffix == ".jsonl":
            rows = _json_rows(stream, path, encoding_errors)
        elif suffix == ".csv":
            rows = _csv_rows(stream, path, encoding_errors)
        else:
            rows = _parquet_rows(stream, path, text_field)
        for where, row in rows:
            yield Document(f"{name}:{where}", row_text(row, text_field, f"{path}:{where}", encoding_errors))


def row_text(row: Mapping[str, Any], text_field: str, where: str, encoding_errors: EncodingErrors) -> str:
    """The text in a row's field.

    Raises:
        InputError: the row has no such field (with the fields it has), or no text that UTF-8 can hold in it.
    """
    if text_field not in row:
        hint = nearest(text_field, row)
        raise InputError(f"{where}: no field {text_field!r} (data.text_field); the row has {', '.join(row)}{hint}")
    text = row[text_field]
    if not isinstance(text, str):
        raise InputError(f"{where}: field {text_field!r} holds {text!r:.40}, but it should hold a text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        # JSON can spell half of a surrogate pair, which is no character.
        if encoding_errors == "strict":
            raise InputError(
                f"{where}: character {error.start} of field {text_field!r} is half a surrogate pair; correct it, or "
                "set data.encoding_errors: replace"
            ) from None
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


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
            with io.BufferedReader(pyarrow.input_stream(path, compression=compression), 2**20) as stream:
                yield stream
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from None


def _decode(content: bytes, path: Path, offset: int, encoding_errors: EncodingErrors) -> str:
    try:
        return content.decode("utf-8", encoding_errors)
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: byte {offset + error.start} is not UTF-8; convert the file, or set data.encoding_errors: replace"
        ) from None


def _lines(stream: Iterable[bytes], path: Path, encoding_errors: EncodingErrors) -> Iterator[str]:
    offset = 0
    for line in stream:
        text = _decode(line, path, offset, encoding_errors)
        yield text.removeprefix("\ufeff") if offset == 0 else text
        offset += len(line)


def _json_rows(
    stream: IO[bytes], path: Path, encoding_errors: EncodingErrors
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(_lines(stream, path, encoding_errors), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}:{number}: not a line of JSON ({error})") from None
        if not isinstance(row, dict):
            raise InputError(
                f"{path}:{number}: a line should be a JSON object with the text in a field, not {line!r:.40}"
            )
        yield number, row


def _csv_rows(
    stream: IO[bytes], path: Path, encoding_errors: EncodingErrors
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    csv.field_size_limit(2**31 - 1)  # the default refuses documents over 128 kB
    reader = csv.DictReader(_lines(stream, path, encoding_errors), restkey="(cells beyond the header)")
    try:
        yield from enumerate(reader, start=1)
    except csv.Error as error:
        raise InputError(f"{path}: line {reader.line_num} is not CSV ({error})") from None


def _parquet_rows(stream: IO[bytes], path: Path, text_field: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with _seekable(stream) as source, pyarrow.parquet.ParquetFile(source) as file:
            names, number = file.schema_arrow.names, 0
            columns = [text_field] if text_field in names else names
            for batch in file.iter_batches(batch_size=256, columns=columns):
                yield from enumerate(batch.to_pylist(), start=number + 1)
                number += batch.num_rows
    except pyarrow.ArrowInvalid as error:
        raise InputError(f"{path}: not a Parquet file ({error})") from None


@contextmanager
def _seekable(stream: IO[bytes]) -> Iterator[IO[bytes]]:
    """The stream itself, or a temporary file with its content: Parquet is read from its end."""
    if stream.seekable():
        yield stream
        return
    with tempfile.TemporaryFile() as copy:
        shutil.copyfileobj(stream, copy, 2**20)
        copy.seek(0)
        yield copy
