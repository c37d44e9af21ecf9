"""From a source to packed training and validation text, done once and kept in a cache that is keyed by content."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import tokenizers
from filelock import FileLock
from transformers import PreTrainedTokenizerFast

from multilin.data.corpora import Document, EncodingErrors, read_documents, source_fingerprint
from multilin.data.packing import PackedText, pack
from multilin.data.progress import Progress, no_progress
from multilin.data.split import Spool, split_document, validation_side
from multilin.data.tokenizers import TokenizerKind, load_tokenizer, tokenizer_hash, train_tokenizer
from multilin.errors import InputError
from multilin.files import atomic_folder, remove_partials

# Counted up whenever the same input would be prepared differently.
FORMAT = 1

_Reader = Callable[[], Iterator[Document]]


@dataclass(frozen=True)
class PreparedText:
    """What training reads."""

    tokenizer: PreTrainedTokenizerFast
    train: PackedText
    validation: PackedText

    @property
    def identity(self) -> str:
        """A hash of the text and its tokens: prepared text lies in a folder that is named by it."""
        return self.train.folder.parent.name


@dataclass(frozen=True)
class _Request:
    source: str
    validation: str | None
    validation_fraction: float
    text_field: str
    encoding_errors: EncodingErrors
    tokenizer_kind: TokenizerKind
    vocab_size: int | None

    def documents(self, field: str) -> Iterator[Document]:
        source = getattr(self, field)
        with _named(f"data.{field}"):
            yield from read_documents(source, text_field=self.text_field, encoding_errors=self.encoding_errors)

    def key(self, tokenizer: PreTrainedTokenizerFast | None) -> str:
        """A hash of the sources' content and of every setting that changes what is prepared."""
        content = asdict(self) | {"format": FORMAT, "tokenizers": tokenizers.__version__}
        for field in ("source", "validation"):
            if content[field] is not None:
                with _named(f"data.{field}"):
                    content[field] = source_fingerprint(content[field])
        if self.validation is not None:
            del content["validation_fraction"]
        if tokenizer is not None:
            del content["tokenizer_kind"], content["vocab_size"]
            content["tokenizer"] = tokenizer_hash(tokenizer)
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def prepare_text(
    *,
    source: str,
    validation: str | None,
    validation_fraction: float,
    text_field: str,
    encoding_errors: EncodingErrors,
    tokenizer_kind: TokenizerKind,
    vocab_size: int | None,
    tokenizer_path: str | None,
    cache_folder: Path | None = None,
    progress: Progress = no_progress,
) -> PreparedText:
    """Read, split, tokenise and pack text; the second time it is only opened.

    Args:
        source: see `read_documents`.
        validation: another source to validate on; None takes whole documents of `source` aside: in the order of their
            texts' hashes as many as fit into `validation_fraction` of its bytes, at least one, and the same text never
            on both sides. A single document is split at a line.
        validation_fraction: between 0 and 1; unused where `validation` is given.
        text_field, encoding_errors: see `read_documents`.
        tokenizer_kind, vocab_size: the tokenizer to train on the training text; unused where `tokenizer_path` is given.
        tokenizer_path: a tokenizer to load instead, see `load_tokenizer`.
        cache_folder: where prepared texts are kept; $XDG_CACHE_HOME/multilin or ~/.cache/multilin by default.
        progress: called with the work under way and the bytes of text done.

    Raises:
        InputError: a source or tokenizer that cannot be used, or a cache that cannot be written; nothing stays behind.
    """
    if validation is None and not 0 < validation_fraction < 1:
        raise InputError(f"data.validation_fraction: {validation_fraction} given, but it should be between 0 and 1")
    request = _Request(source, validation, validation_fraction, text_field, encoding_errors, tokenizer_kind, vocab_size)
    tokenizer = None if tokenizer_path is None else load_tokenizer(tokenizer_path)
    cache = _cache_folder() if cache_folder is None else Path(cache_folder)
    folder = cache / request.key(tokenizer)
    if not folder.exists():
        _prepare_once(request, tokenizer, folder, progress)
    prepared = load_tokenizer(str(folder / "tokenizer"))
    return PreparedText(prepared, PackedText.open(folder / "train"), PackedText.open(folder / "validation"))


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "multilin"


@contextmanager
def _named(field: str) -> Iterator[None]:
    """Put the setting in front of a message about a source."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{field}: {error}") from error.__cause__


def _prepare_once(
    request: _Request, tokenizer: PreTrainedTokenizerFast | None, folder: Path, progress: Progress
) -> None:
    """Prepare into a folder beside and rename it, so that the cache holds whole entries only, whoever interrupts."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f"{folder.name}.lock")):  # several processes may start the same training
            if folder.exists():
                return
            remove_partials(folder.parent, folder.name)
            with atomic_folder(folder) as partial:
                _prepare(request, tokenizer, partial, progress)
    except OSError as error:
        raise InputError(
            f"the data cache {folder.parent} cannot be written ({error.strerror or error}); set XDG_CACHE_HOME to a "
            "folder with room"
        ) from error


def _prepare(request: _Request, tokenizer: PreTrainedTokenizerFast | None, folder: Path, progress: Progress) -> None:
    spools, train, validation = _split(request, folder, progress)
    if tokenizer is None:
        texts = _reported((document.text for document in train()), partial(progress, "training the tokenizer"))
        tokenizer = train_tokenizer(texts, request.tokenizer_kind, request.vocab_size)
    tokenizer.save_pretrained(folder / "tokenizer")
    pack(train(), tokenizer, folder / "train", partial(progress, "packing the training text"))
    pack(validation(), tokenizer, folder / "validation", partial(progress, "packing the validation text"))
    for spool in spools:
        spool.path.unlink()


def _split(request: _Request, folder: Path, progress: Progress) -> tuple[list[Spool], _Reader, _Reader]:
    """What was set aside on disk, and how to read the documents of each side from there."""
    report = partial(progress, "reading")
    source = Spool.write(request.documents("source"), folder / "source.jsonl", report)
    if request.validation is not None:
        other = Spool.write(request.documents("validation"), folder / "validation.jsonl", report)
        return [source, other], source.read, other.read
    if len(source.sizes) == 1:
        first, last = split_document(next(source.read()), request.validation_fraction)
        return [source], lambda: iter([first]), lambda: iter([last])
    side = validation_side(source.hashes, source.sizes, request.validation_fraction)
    return [source], partial(source.read, ~side), partial(source.read, side)


def _reported(texts: Iterable[str], progress: Callable[[int], None]) -> Iterator[str]:
    count = 0
    for text in texts:
        yield text
        count += len(text.encode())
        progress(count)
