"""Where text comes from: built-in corpora, files, folders, globs and hub datasets, read as a stream of documents."""

import glob
import hashlib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from multilin.data.files import SUPPORTED, Document, EncodingErrors, check_file, file_format, read_file, row_document
from multilin.data.python_library import library_files, python_docs, python_source
from multilin.errors import InputError, as_input_error, nearest, shown
from multilin.files import checksum

if TYPE_CHECKING:
    from datasets import IterableDataset

BUILT_IN: dict[str, Callable[[], Iterator[Document]]] = {"python-docs": python_docs, "python-source": python_source}
MOST_FILES = 1_000_000
_HUB_PREFIX = "hub:"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(/[\w.-]+)?(:[^/\\]+)?")


def read_documents(
    source: str, *, text_field: str = "text", encoding_errors: EncodingErrors = "strict"
) -> Iterator[Document]:
    """The documents of a source in a fixed order, one at a time; documents without any text are left out.

    Args:
        source: `python-docs` or `python-source`; a file, folder (read with its subfolders) or glob of .txt .md .jsonl
            .csv .parquet, also .gz or .zst; or a hub dataset: `owner/name[:split]`, `owner/name/config[:split]`, and
            with `hub:` in front also a name without owner or a local folder that `datasets` can load. The split is
            `train` if none is given. Rows hold texts or conversations, see `multilin.data.chat`.
        text_field: the field with the text, where documents are rows.
        encoding_errors: `strict` refuses bytes that are not UTF-8, `replace` puts U+FFFD in their place.

    Raises:
        InputError: the source does not exist, holds no text, or cannot be read as what its name says. It comes when the
            first document is asked for.
    """
    empty = True
    for document in of_one_kind(_all_documents(source, text_field, encoding_errors), source):
        empty = False
        yield document
    if empty:
        raise InputError(f"{shown(source)} is empty: a corpus needs some text")


def of_one_kind(documents: Iterable[Document], source: str) -> Iterator[Document]:
    """The documents that are not empty.

    Raises:
        InputError: both texts and conversations among them.
    """
    is_chat = None
    for document in documents:
        if document.text:
            if is_chat not in (None, document.messages is not None):
                kinds = ("a text", "conversations") if is_chat else ("a conversation", "texts")
                raise InputError(f"{shown(source)}: {document.name} is {kinds[0]} among {kinds[1]}; give them apart")
            is_chat = document.messages is not None
            yield document


def source_fingerprint(source: str) -> str:
    """A hash of a source's content and of the names of its documents, wherever on disk they are.

    Raises:
        InputError: the source does not exist.
    """
    digest = hashlib.sha256()
    if source in BUILT_IN:
        digest.update(source.encode())
        files = [(path.name, path) for path in library_files()]
    elif is_hub(source):
        name, config, split = _hub_parts(source)
        if not Path(name).is_dir():
            return hashlib.sha256(f"{name} {config} {split} {hub_revision(source)}".encode()).hexdigest()
        digest.update(f"{config} {split}".encode())
        files = [(path.relative_to(name).as_posix(), path) for path in sorted(Path(name).rglob("*")) if path.is_file()]
    else:
        files = source_files(source)
    for name, path in files:
        try:
            digest.update(f"{len(name)} {name} ".encode(errors="surrogateescape") + bytes.fromhex(checksum(path)))
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    return digest.hexdigest()


def _all_documents(source: str, text_field: str, encoding_errors: EncodingErrors) -> Iterator[Document]:
    if source in BUILT_IN:
        yield from BUILT_IN[source]()
    elif is_hub(source):
        *_, split = _hub_parts(source)
        with hub_errors(source):
            for number, row in enumerate(hub_dataset(source), start=1):
                yield row_document(row, f"{split}:{number}", text_field, f"{source}:{number}", encoding_errors)
    else:
        for name, path in source_files(source):
            yield from read_file(path, name, text_field, encoding_errors)


def source_files(source: str) -> list[tuple[str, Path]]:
    """The supported files of a file, folder or glob, each with its name relative to the source.

    Raises:
        InputError: there are no files or too many, or one is no regular file.
    """
    path = Path(source)
    if path.is_dir():
        root, candidates = path, _few(path.rglob("*"), source)
    elif path.exists():
        if file_format(path) is None:
            raise InputError(f"{shown(source)} is not a supported file; supported are {SUPPORTED}")
        check_file(path)
        return [(path.name, path)]
    elif glob.has_magic(source):
        root = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), path.parts[:-1]))
        try:
            candidates = _few(root.glob(path.relative_to(root).as_posix()), source)
        except ValueError as error:
            raise InputError(f"{shown(source)} given, but {error}; give a glob such as 'texts/**/*.txt'") from None
        if not candidates:
            raise InputError(f"{shown(source)} matches no file")
    else:
        raise InputError(
            f"{shown(source)} does not exist: give a file, a folder, a glob, a hub dataset (owner/name) or one of "
            f"{', '.join(BUILT_IN)}{nearest(source, BUILT_IN)}"
        )
    named = [(file.relative_to(root), file) for file in candidates if file_format(file) and file.is_file()]
    visible = [(name.as_posix(), file) for name, file in named if not any(part[0] == "." for part in name.parts)]
    if not visible:
        raise InputError(f"{shown(source)} holds no supported file; supported are {SUPPORTED}")
    for _, file in visible:
        check_file(file)
    return sorted(visible)


def _few(paths: Iterator[Path], source: str) -> list[Path]:
    few = list(itertools.islice(paths, MOST_FILES + 1))
    if len(few) > MOST_FILES:
        raise InputError(f"{shown(source)} holds more than {MOST_FILES:,} files and folders; name a smaller part of it")
    return few


def is_hub(source: str) -> bool:
    """True if a source is a dataset that `datasets` loads."""
    if source.startswith(_HUB_PREFIX):
        return True
    # A name below what exists here is a mistyped path; asking the hub for it would only take time.
    is_path = Path(source).parent.parts and Path(Path(source).parts[0]).exists()
    return not is_path and _HUB_NAME.fullmatch(source) is not None and file_format(Path(source)) is None


def _hub_parts(source: str) -> tuple[str, str | None, str]:
    """Name (or local folder), configuration and split."""
    name, _, split = source.removeprefix(_HUB_PREFIX).partition(":")
    config = None
    if not Path(name).is_dir() and name.count("/") == 2:
        name, _, config = name.rpartition("/")
    return name, config, split or "train"


def hub_dataset(source: str, revision: str | None = None) -> "IterableDataset":
    """A hub dataset as a stream of rows, at a commit of its repository or at the newest.

    Raises:
        InputError: there is no such dataset, as far as is known before a row is read.
    """
    from datasets import load_dataset

    name, config, split = _hub_parts(source)
    with hub_errors(source):
        return load_dataset(name, config, split=split, streaming=True, revision=revision)


def hub_errors(source: str) -> AbstractContextManager[None]:
    """A block in which every error of the hub's client becomes an InputError."""
    return as_input_error(
        lambda reason: f"{shown(source)} is neither a file or folder here nor a dataset the hub gives ({reason})"
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
