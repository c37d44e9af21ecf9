"""Reads text from built-in corpora, files, folders, globs and hub datasets, as a stream of documents.

`cut_source` cuts a source into parts, and several processes read the parts with `read_part`.
"""

import glob
import hashlib
import itertools
import json
import os
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING

from multilin.data.files import SUPPORTED, Document, EncodingErrors, check_file, file_format, read_file, row_document
from multilin.data.python_library import library_files, python_docs, python_source
from multilin.errors import InputError, as_input_error, nearest, plural, shorten, shown, warn_once
from multilin.files import checksum

if TYPE_CHECKING:
    from datasets import IterableDataset

BUILT_IN: dict[str, Callable[[], Iterator[Document]]] = {"python-docs": python_docs, "python-source": python_source}
PART_BYTES = 2**26
"""Number of bytes in a part of a source, as far as files can be cut there."""
_HUB_PREFIX = "hub:"
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*(/[\w.-]+)?(:[^/\\]+)?")


def read_documents(
    source: str, *, text_field: str = "text", encoding_errors: EncodingErrors = "strict"
) -> Iterator[Document]:
    """The documents of a source in a fixed order, one at a time.

    Documents without any text are left out. Rows whose text is null and files of other kinds are left out too, and a
    warning says how many. A file or folder to which several links lead is read once.

    Args:
        source: `python-docs` or `python-source`; a file, folder (read with its subfolders) or glob of .txt .md .jsonl
            .csv .parquet, also .gz or .zst; or a hub dataset: `owner/name[:split]` or `owner/name/config[:split]`.
            After `hub:`, a name without owner or a local folder for `datasets` is possible too. The default split is
            `train`. Rows hold texts or conversations, see `multilin.data.chat`.
        text_field: the field with the text, if documents are rows.
        encoding_errors: `strict` refuses bytes that are not UTF-8, `replace` replaces such bytes by U+FFFD.

    Raises:
        InputError: the source does not exist, holds no text, or cannot be read in the format that its name says. The
            error is raised when the first document is requested.
    """
    empty, left_out = True, Counter[str]()
    for document in of_one_kind(_all_documents(source, text_field, encoding_errors), source, left_out):
        empty = False
        yield document
    report_left_out(source, left_out)
    if empty:
        raise InputError(f"{shown(source)} is empty: a corpus needs some text")


def report_left_out(source: str, left_out: Mapping[str, int]) -> None:
    """Warn of what `of_one_kind` has left out."""
    if number := left_out.get("null", 0):
        warn_once(f"{shown(source)}: left out {plural(number, 'row')} whose text is null (in .csv an empty cell)")


def of_one_kind(documents: Iterable[Document], source: str, left_out: Counter[str]) -> Iterator[Document]:
    """Yield the documents that are not empty; count rows whose text is null in `left_out`.

    Raises:
        InputError: there are both texts and conversations.
    """
    is_chat = None
    for document in documents:
        left_out["null"] += document.is_null
        if document.text:
            if is_chat not in (None, document.messages is not None):
                kinds = ("a text", "conversations") if is_chat else ("a conversation", "texts")
                raise InputError(f"{shown(source)}: {document.name} is {kinds[0]} among {kinds[1]}; do not mix the two")
            is_chat = document.messages is not None
            yield document


def source_fingerprint(source: str) -> str:
    """A hash of a source's content and of the names of its documents, independent of the source's location.

    Raises:
        InputError: the source does not exist.
    """
    digest = hashlib.sha256()
    if is_built_in(source):
        digest.update(source.encode())
        files = [(path.name, path) for path in library_files()]
    elif is_hub(source):
        name, config, split = _hub_parts(source)
        if not Path(name).is_dir():
            return hashlib.sha256(f"{name} {config} {split} {hub_revision(source)}".encode()).hexdigest()
        digest.update(f"{config} {split}".encode())
        found = _matching(Path(name), ("**", "*"))
        files = sorted((path.relative_to(name).as_posix(), path) for path in found if path.is_file())
    else:
        files = source_files(source)
    for name, path in files:
        try:
            digest.update(f"{len(name)} {name} ".encode(errors="surrogateescape") + bytes.fromhex(checksum(path)))
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    return digest.hexdigest()


def _all_documents(source: str, text_field: str, encoding_errors: EncodingErrors) -> Iterator[Document]:
    if is_built_in(source):
        yield from BUILT_IN[source]()
    elif is_hub(source):
        yield from _rows(hub_dataset(source), source, _hub_parts(source)[2], text_field, encoding_errors)
    else:
        for name, path in source_files(source):
            yield from read_file(path, name, text_field, encoding_errors)


def _rows(
    rows: "IterableDataset", source: str, kind: str, text_field: str, encoding_errors: EncodingErrors
) -> Iterator[Document]:
    """The documents of a split, or of one shard, of a hub dataset; `kind` names the split or shard in messages."""
    with hub_errors(source):
        for number, row in enumerate(rows, start=1):
            yield row_document(
                row, f"{kind}:{number}", text_field, f"{source}: row {number} of {kind}", encoding_errors
            )


@dataclass(frozen=True)
class Part:
    """The part of a source that one process reads at a time; a built-in corpus is one part.

    Attributes:
        files: names and paths of files, which are read one after the other.
        span: for a .jsonl file, the range of bytes in which the lines of the part begin.
        shard: for a hub dataset, the index of the shard, the number of shards, and the commit of the repository.
    """

    files: tuple[tuple[str, str], ...] = ()
    span: tuple[int, int] | None = None
    shard: tuple[int, int, str | None] | None = None


def cut_source(source: str) -> tuple[list[Part], str]:
    """The parts of a source, in the source's order, and a hash that changes with its files or its revision.

    A .jsonl file is cut between lines, small files are joined, and a hub dataset keeps its shards. Files of other
    formats are not cut, since they cannot be read from the middle.

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


def read_part(
    source: str, part: Part, text_field: str, encoding_errors: EncodingErrors, left_out: Counter[str]
) -> Iterator[Document]:
    """The documents of a part, checked by `of_one_kind`; other arguments are the same as for `read_documents`."""
    if part.shard is not None:
        index, count, revision = part.shard
        rows = hub_dataset(source, revision).shard(num_shards=count, index=index)
        documents = _rows(rows, source, f"shard {index}", text_field, encoding_errors)
    elif part.files:
        read = (read_file(Path(path), name, text_field, encoding_errors, part.span) for name, path in part.files)
        documents = itertools.chain.from_iterable(read)
    else:
        documents = BUILT_IN[source]()
    return of_one_kind(documents, source, left_out)


def is_built_in(source: str) -> bool:
    """True for a built-in corpus; warns if a file or folder here has the same name."""
    if source in BUILT_IN and Path(source).exists():
        warn_once(f"{source} is read as the built-in corpus; write ./{source} for the file or folder of this name")
    return source in BUILT_IN


def source_files(source: str) -> list[tuple[str, Path]]:
    """The supported files of a file, folder or glob, each with its name relative to the source.

    Other files are skipped, with a warning.

    Raises:
        InputError: there are no files, or a file is not a regular file or cannot be found.
    """
    path = Path(source)
    if path.is_dir():
        root, candidates = path, list(_matching(path, ("**", "*")))
    elif path.exists():
        if file_format(path) is None:
            raise InputError(f"{shown(source)} is not a supported file; supported are {SUPPORTED}")
        check_file(path)
        return [(path.name, path)]
    elif glob.has_magic(source):
        root = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), path.parts[:-1]))
        parts = path.relative_to(root).parts
        if any("**" in part and part != "**" for part in parts):
            raise InputError(f"{shown(source)} given, but ** should be a whole folder name, as in 'texts/**/*.txt'")
        candidates = list(_matching(root, parts))
        if not candidates:
            raise InputError(f"{shown(source)} matches no file")
    else:
        raise InputError(
            f"{shown(source)} does not exist: give a file, a folder, a glob, a hub dataset (owner/name) or one of "
            f"{', '.join(BUILT_IN)}{nearest(source, BUILT_IN)}"
        )
    files = [file for file in candidates if not file.is_dir()]
    supported = [file for file in files if file_format(file) is not None]
    if not supported:
        raise InputError(f"{shown(source)} holds no supported file; supported are {SUPPORTED}")
    if others := Counter(_kind(file) for file in files if file_format(file) is None):
        kinds = shorten(", ".join(f"{kind} ({number})" for kind, number in others.most_common()), 200)
        warn_once(f"{shown(source)}: skipped {plural(others.total(), 'file')} of other kinds: {kinds}")
    for file in supported:
        check_file(file)
    # The last of several names of a file is kept: one that is not a link, if there is one.
    links_first = sorted(supported, key=lambda file: (file.is_symlink(), file), reverse=True)
    once = {os.path.realpath(file): file for file in links_first}.values()
    return sorted((file.relative_to(root).as_posix(), file) for file in once)


def linked_folders(folder: Path) -> list[Path]:
    """The folders to which links in a folder lead, at any depth; files of these folders are read too."""
    return [Path(os.path.realpath(path)) for path in _matching(folder, ["**"]) if path.is_symlink()]


def _kind(file: Path) -> str:
    return (file.suffix.lower() or "without a suffix") if file.exists() else "broken links"


def _matching(root: Path, parts: Iterable[str]) -> Iterator[Path]:
    """The visible files and folders below a folder that match the parts of a glob; links are followed."""
    return reduce(_entries, parts, iter([root]))


def _entries(paths: Iterable[Path], part: str) -> Iterator[Path]:
    """The visible entries of folders that match one part of a glob; for `**`, the folders and all folders below.

    A folder with several names is entered once, so that loops end; a name that is not a link is preferred.
    """
    waiting, entered = deque(sorted(paths, key=Path.is_symlink)), set[str]()
    while waiting:
        folder = waiting.popleft()
        real = os.path.realpath(folder)
        if real in entered or not folder.is_dir():
            continue
        entered.add(real)
        try:
            entries = sorted(path for path in folder.iterdir() if path.name[0] != ".")
        except OSError as error:
            raise InputError(f"{folder}: cannot be read ({error.strerror})") from None
        if part == "**":
            yield folder
            below = [path for path in entries if path.is_dir()]
            waiting.extendleft(path for path in reversed(below) if not path.is_symlink())
            waiting.extend(path for path in below if path.is_symlink())
        else:
            yield from (path for path in entries if fnmatchcase(path.name, part))


def is_hub(source: str) -> bool:
    """True if a source is a dataset that `datasets` loads."""
    if source.startswith(_HUB_PREFIX):
        return True
    # A name whose first part exists here is a mistyped path; asking the hub would only take time.
    is_path = Path(source).parent.parts and Path(Path(source).parts[0]).exists()
    return not is_path and _HUB_NAME.fullmatch(source) is not None and file_format(Path(source)) is None


def _hub_parts(source: str) -> tuple[str, str | None, str]:
    """The name (or local folder), configuration and split of a hub dataset."""
    name, _, split = source.removeprefix(_HUB_PREFIX).partition(":")
    config = None
    if not Path(name).is_dir() and name.count("/") == 2:
        name, _, config = name.rpartition("/")
    return name, config, split or "train"


def hub_dataset(source: str, revision: str | None = None) -> "IterableDataset":
    """A hub dataset as a stream of rows, at the given commit of its repository or at the newest commit.

    Raises:
        InputError: a local dataset has links to folders, or there is no such dataset. Some missing datasets are noticed
            only when a row is read.
    """
    from datasets import load_dataset

    name, config, split = _hub_parts(source)
    for path in _matching(Path(name), ("**", "*")) if Path(name).is_dir() else ():
        if path.is_symlink() and path.is_dir():
            raise InputError(f"{shown(source)}: {path} is a link to a folder, which `datasets` does not follow")
    with hub_errors(source):
        return load_dataset(name, config, split=split, streaming=True, revision=revision)


def hub_errors(source: str) -> AbstractContextManager[None]:
    """Context in which every error of the hub's client becomes an InputError."""
    return as_input_error(
        lambda reason: f"{shown(source)} is neither a file or folder here nor a dataset the hub provides ({reason})"
    )


def hub_revision(source: str) -> str | None:
    """The newest commit of a hub dataset's repository; None for a folder on this machine.

    Raises:
        InputError: there is no such dataset.
    """
    from huggingface_hub import HfApi

    name, *_ = _hub_parts(source)
    if Path(name).is_dir():
        return None
    with hub_errors(source):
        return HfApi().dataset_info(name, timeout=20).sha
