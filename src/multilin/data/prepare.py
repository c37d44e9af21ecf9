"""Prepares packed training and validation text from a source, once, and keeps the result in a cache."""

import hashlib
import json
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import tokenizers
from rich.filesize import decimal
from transformers import PreTrainedTokenizerFast

from multilin.data.chat import CHAT_TEMPLATE
from multilin.data.corpora import read_documents, source_fingerprint
from multilin.data.files import Document
from multilin.data.packed_text import PackedText, pack, write_description
from multilin.data.prepared import PreparedText, open_mixture, open_prepared
from multilin.data.progress import Progress, no_progress
from multilin.data.settings import DEFAULT_KIND, DataRecipe, TokenizerRecipe
from multilin.data.split import TRAIN, VALIDATION, Census, Split, with_summary
from multilin.data.store import cache_root, make_once
from multilin.data.tokenizers import load_tokenizer, save_tokenizer, tokenizer_hash, train_tokenizer
from multilin.errors import InputError, plural, prefixed

# Increased whenever the same input would be prepared differently.
FORMAT = 7
_REPORT_BYTES = 2**22


class Spool:
    """Documents kept in a file of JSON lines, so that they can be read several times, and their `Census`."""

    def __init__(self, documents: Iterable[Document], path: Path, progress: Callable[[int], None]) -> None:
        self._path, self.census, reported = path, Census(), 0
        with path.open("w", encoding="utf-8") as stream:
            for document in documents:
                self.census.add(document)
                stream.write(json.dumps((document.name, document.text, document.messages)) + "\n")
                if self.census.num_bytes - reported >= _REPORT_BYTES:
                    progress(reported := self.census.num_bytes)
        progress(self.census.num_bytes)

    def __iter__(self) -> Iterator[Document]:
        with self._path.open(encoding="utf-8") as stream:
            for line in stream:
                yield Document(*json.loads(line))


def prepare_text(
    data: DataRecipe, recipe: TokenizerRecipe, *, cache_folder: Path | None = None, progress: Progress = no_progress
) -> PreparedText:
    """Read, split, tokenise and pack text. If the text was prepared before, here or as shards, only open the result.

    Args:
        data: the sources, see `read_documents`. Without a second source for validation, `validation_fraction` of the
            first source is set aside, see `multilin.data.split.Split`.
        recipe: the tokenizer to train on the training text, or to load by `load_tokenizer`.
        cache_folder: where prepared texts are kept; $XDG_CACHE_HOME/multilin or ~/.cache/multilin by default.
        progress: called with the name of the current work and the bytes of text done.

    Raises:
        InputError: a source or tokenizer cannot be used, or the cache cannot be written; no file is left behind.
    """
    if data.is_prepared:
        return _part(_open_shards(data, recipe, progress), data)
    loaded = None if recipe.path is None else load_tokenizer(recipe.path)
    identity = _identity(data, recipe, loaded)
    # Another version of the tokenizers or of this package may pack differently, so it packs again.
    name = hashlib.sha256(f"{FORMAT} {tokenizers.__version__} {identity}".encode()).hexdigest()[:32]
    folder = Path(cache_folder or cache_root()) / name
    make_once(folder, partial(_prepare, data, recipe, loaded, progress))
    prepared = load_tokenizer(str(folder / "tokenizer"))
    train, validation = (PackedText.open(folder / side) for side in ("train", "validation"))
    if validation.description.num_cut:  # a run of another version may have validated on other parts of this text
        identity = hashlib.sha256(f"{identity} {validation.description.summary}".encode()).hexdigest()[:32]
    return _part(PreparedText(prepared, train, validation, identity), data)


def _part(text: PreparedText, data: DataRecipe) -> PreparedText:
    """The prepared text, with only the requested part of the validation text."""
    if data.validation_part == "all":
        return text
    if text.validation.num_documents < 2 and not text.validation.description.num_cut:
        raise InputError(
            f"data.validation_part: {data.validation_part} given, but there is only one document to validate on"
        )
    return replace(text, validation=text.validation.every_other(["final", "tuning"].index(data.validation_part)))


def _open_shards(data: DataRecipe, recipe: TokenizerRecipe, progress: Progress) -> PreparedText:
    """Open text that `multilin prepare` made, with the tokenizer and the validation text that it contains."""
    text = open_mixture(data.mix, progress) if data.mix else open_prepared("data.source", data.source, progress)
    if data.validation is not None:
        raise InputError("data.validation: given, but prepared text has its own validation text; leave it out")
    expected = text.validation.description.tokenizer_hash
    if recipe.path is not None and tokenizer_hash(load_tokenizer(recipe.path)) != expected:
        raise InputError(
            f"tokenizer.path: {recipe.path} given, but the prepared text has another tokenizer; leave it out, or "
            "prepare the text with this tokenizer"
        )
    return text


def _identity(data: DataRecipe, recipe: TokenizerRecipe, tokenizer: PreTrainedTokenizerFast | None) -> str:
    """A hash of the sources' content and of every setting that changes the prepared text."""
    content = asdict(data)
    for field in ("mix", "validation_part"):
        del content[field]
    for field in ("source", "validation"):
        if content[field] is not None:
            with prefixed(f"data.{field}: "):
                content[field] = source_fingerprint(content[field])
    if data.validation is not None:
        del content["validation_fraction"]
    if tokenizer is None:
        content |= {"tokenizer_kind": recipe.kind, "vocab_size": recipe.vocab_size}
    else:
        content["tokenizer"] = tokenizer_hash(tokenizer)
        if tokenizer.chat_template not in (None, CHAT_TEMPLATE):
            content["chat_template"] = tokenizer.chat_template
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def _documents(data: DataRecipe, field: str) -> Iterator[Document]:
    with prefixed(f"data.{field}: "):
        yield from read_documents(
            getattr(data, field), text_field=data.text_field, encoding_errors=data.encoding_errors
        )


def _prepare(
    data: DataRecipe, recipe: TokenizerRecipe, loaded: PreTrainedTokenizerFast | None, progress: Progress, folder: Path
) -> None:
    with TemporaryDirectory(dir=folder) as temporary:
        source = Spool(_documents(data, "source"), Path(temporary, "source.jsonl"), partial(progress, "reading"))
        if data.validation is None:
            with prefixed("data.source: "):
                split = Split.of_all(source.census, data.validation_fraction)
            sides = [partial(split.side, source, side) for side in (TRAIN, VALIDATION)]
        else:
            other = Spool(_documents(data, "validation"), Path(temporary, "other.jsonl"), partial(progress, "reading"))
            _warn_of_trained(data, source.census, other.census)
            sides = [partial(iter, source), partial(iter, other)]
        texts = reported_texts(sides[0](), progress)
        tokenizer = loaded or train_tokenizer(texts, recipe.kind or DEFAULT_KIND, recipe.vocab_size)
        if source.census.is_chat and tokenizer.chat_template is None:
            tokenizer.chat_template = CHAT_TEMPLATE
        save_tokenizer(tokenizer, folder / "tokenizer")
        train, validation = (
            pack(read(), tokenizer, folder / name, partial(progress, f"packing the {side} text")).description
            for read, name, side in zip(sides, ("train", "validation"), ("training", "validation"), strict=True)
        )
    if train.is_chat != validation.is_chat:
        kinds = ("conversations", "texts") if train.is_chat else ("texts", "conversations")
        raise InputError(f"data.validation: {data.validation} holds {kinds[1]}, but data.source holds {kinds[0]}")
    if data.validation is None:
        described = with_summary(train, validation, split.summary, len(source.census.hashes))
    else:
        number = plural(len(other.census.hashes), "document")
        described = replace(validation, summary=f"{number} of data.validation, {decimal(other.census.num_bytes)}")
    write_description(folder / "validation", described)


def _warn_of_trained(data: DataRecipe, train: Census, validation: Census) -> None:
    if trained := int(np.isin(validation.hashes, train.hashes).sum()):
        warnings.warn(
            f"data.validation: {plural(trained, 'document')} of {len(validation.hashes)} from {data.validation} are "
            "also in the training text, so low bits per byte say less about new text",
            stacklevel=2,
        )


def reported_texts(documents: Iterable[Document], progress: Progress) -> Iterator[str]:
    """The texts of documents, to train a tokenizer on; after each, `progress` is called with the bytes so far."""
    count = 0
    for document in documents:
        yield document.text
        count += len(document.text.encode())
        progress("training the tokenizer", count)
