"""From a source to packed training and validation text, done once and kept in a cache that is keyed by content."""

import hashlib
import itertools
import json
import warnings
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import tokenizers
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from multilin.data.chat import CHAT_TEMPLATE
from multilin.data.corpora import read_documents, source_fingerprint
from multilin.data.files import Document
from multilin.data.packed_text import PackedText
from multilin.data.packing import pack, text_hash
from multilin.data.prepared import PreparedText, open_mixture, open_prepared
from multilin.data.progress import Progress, no_progress
from multilin.data.settings import DEFAULT_KIND, DataRecipe, TokenizerRecipe
from multilin.data.store import cache_root, make_once
from multilin.data.tokenizers import load_tokenizer, save_tokenizer, tokenizer_hash, train_tokenizer
from multilin.errors import InputError, plural, prefixed

# Counted up whenever the same input would be prepared differently.
FORMAT = 5
_REPORT_BYTES = 2**22

_Reader = Callable[[], Iterator[Document]]


@dataclass(frozen=True)
class Spool:
    """Documents in a file of JSON lines.

    Attributes:
        path: the file.
        hashes: (documents,) uint64, a hash of each text.
        sizes: (documents,) int64, UTF-8 bytes of each text.
    """

    path: Path
    hashes: NDArray[np.uint64]
    sizes: NDArray[np.int64]

    @classmethod
    def write(cls, documents: Iterable[Document], path: Path, progress: Callable[[int], None]) -> "Spool":
        """Write documents to a new file; `progress` is called now and then with the bytes of text so far."""
        hashes, sizes, total, reported = array("Q"), array("q"), 0, 0
        with path.open("w", encoding="utf-8", errors="surrogatepass") as stream:
            for document in documents:
                content = document.text.encode()
                hashes.append(text_hash(content))
                sizes.append(len(content))
                fields = (document.name, document.text, document.messages)
                stream.write(json.dumps(fields, ensure_ascii=False) + "\n")
                total += len(content)
                if total - reported >= _REPORT_BYTES:
                    progress(total)
                    reported = total
        progress(total)
        return cls(path, np.array(hashes, dtype=np.uint64), np.array(sizes, dtype=np.int64))

    def read(self, side: NDArray[np.bool_] | None = None) -> Iterator[Document]:
        """The documents in their order; with `side`, (documents,), only those for which it is True."""
        # JSON escapes newlines but not U+2028, which only str.splitlines takes for one; files split at \n alone.
        with self.path.open(encoding="utf-8", errors="surrogatepass", newline="\n") as stream:
            for index, line in enumerate(stream):
                if side is None or side[index]:
                    yield Document(*json.loads(line))


def prepare_text(
    data: DataRecipe, recipe: TokenizerRecipe, *, cache_folder: Path | None = None, progress: Progress = no_progress
) -> PreparedText:
    """Read, split, tokenise and pack text; a text that was prepared before, here or as shards, is only opened.

    Args:
        data: the sources, see `read_documents`. Without a second source to validate on, whole documents of the first
            are set aside: in the order of the hashes of their texts, as many as fit into `validation_fraction` of its
            bytes, and the same text never on both sides. Where these are hardly any, the shortest of the others is set
            aside too: whole, or where it is long its end, from a line on, as much as fits.
        recipe: the tokenizer to train on the training text, or to load, see `load_tokenizer`.
        cache_folder: where prepared texts are kept; $XDG_CACHE_HOME/multilin or ~/.cache/multilin by default.
        progress: called with the work under way and the bytes of text done.

    Raises:
        InputError: a source or tokenizer cannot be used, or the cache cannot be written; no file is left behind.
    """
    if data.is_prepared:
        return _part(_open_shards(data, recipe, progress), data)
    loaded = None if recipe.path is None else load_tokenizer(recipe.path)
    identity = _identity(data, recipe, loaded)
    # Packed again where another version of the tokenizers or of this package might pack otherwise.
    name = hashlib.sha256(f"{FORMAT} {tokenizers.__version__} {identity}".encode()).hexdigest()[:32]
    folder = Path(cache_folder or cache_root()) / name
    make_once(folder, partial(_prepare, data, recipe, loaded, progress))
    prepared = load_tokenizer(str(folder / "tokenizer"))
    train, validation = (PackedText.open(folder / side) for side in ("train", "validation"))
    return _part(PreparedText(prepared, train, validation, identity), data)


def _part(text: PreparedText, data: DataRecipe) -> PreparedText:
    """The text with the validation documents that are asked for."""
    if data.validation_part == "all":
        return text
    if text.validation.num_documents < 2:
        raise InputError(
            f"data.validation_part: {data.validation_part} given, but there is only one document to validate on"
        )
    return replace(text, validation=text.validation.every_other(["final", "tuning"].index(data.validation_part)))


def _open_shards(data: DataRecipe, recipe: TokenizerRecipe, progress: Progress) -> PreparedText:
    """Open text that `multilin prepare` made, which comes with its tokenizer and its validation text."""
    text = open_mixture(data.mix, progress) if data.mix else open_prepared("data.source", data.source, progress)
    if data.validation is not None:
        raise InputError("data.validation: given, but prepared text has its own to validate on; leave it out")
    expected = text.validation.description.tokenizer_hash
    if recipe.path is not None and tokenizer_hash(load_tokenizer(recipe.path)) != expected:
        raise InputError(
            f"tokenizer.path: {recipe.path} given, but the prepared text was packed with another one; leave it out, or "
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
    with TemporaryDirectory(dir=folder) as spools:
        train, validation = _split(data, Path(spools), progress)
        tokenizer = loaded or train_tokenizer(
            reported_texts(train(), progress), recipe.kind or DEFAULT_KIND, recipe.vocab_size
        )
        if next(train()).messages is not None and tokenizer.chat_template is None:
            tokenizer.chat_template = CHAT_TEMPLATE
        save_tokenizer(tokenizer, folder / "tokenizer")
        first = pack(train(), tokenizer, folder / "train", partial(progress, "packing the training text"))
        second = pack(validation(), tokenizer, folder / "validation", partial(progress, "packing the validation text"))
    if first.description.is_chat != second.description.is_chat:
        kinds = ("conversations", "texts") if first.description.is_chat else ("texts", "conversations")
        raise InputError(f"data.validation: {data.validation} holds {kinds[1]}, but data.source holds {kinds[0]}")


def _split(data: DataRecipe, folder: Path, progress: Progress) -> tuple[_Reader, _Reader]:
    """Functions that read the documents to train on and those to validate on, from files that are made in a folder."""
    report = partial(progress, "reading")
    source = Spool.write(_documents(data, "source"), folder / "source.jsonl", report)
    if data.validation is not None:
        other = Spool.write(_documents(data, "validation"), folder / "validation.jsonl", report)
        if trained := int(np.isin(other.hashes, source.hashes).sum()):
            warnings.warn(
                f"data.validation: {plural(trained, 'document')} of {len(other.sizes)} from {data.validation} are also "
                "among those to train on, so that a low number of bits per byte says less",
                stacklevel=2,
            )
        return source.read, other.read
    side, cut = validation_side(source.hashes, source.sizes, data.validation_fraction)
    if cut is not None:
        here = np.arange(len(side)) == cut
        document = next(source.read(here))
        if len(side) == 1 or (document.messages is None and len(document.text) > 1):
            missing = data.validation_fraction * source.sizes.sum() - source.sizes[side].sum()
            first, last = split_document(document, float(missing / source.sizes[cut]))
            return (
                lambda: itertools.chain(source.read(~side & ~here), [first]),
                lambda: itertools.chain(source.read(side), [last]),
            )
        side |= here & ~side.any()  # it is set aside whole, if at all
    return partial(source.read, ~side), partial(source.read, side)


def reported_texts(documents: Iterable[Document], progress: Progress) -> Iterator[str]:
    """The texts that a tokenizer is trained on; after each, `progress` is called with the bytes so far."""
    count = 0
    for document in documents:
        yield document.text
        count += len(document.text.encode())
        progress("training the tokenizer", count)


def validation_side(
    hashes: NDArray[np.uint64], sizes: NDArray[np.int64], fraction: float
) -> tuple[NDArray[np.bool_], int | None]:
    """(documents,) which documents to validate on, and the number of another whose end is needed too, or None.

    In the order of the hashes, every text that still fits into `fraction` of all bytes is taken. Where these are less
    than a tenth of that, the shortest text left is taken whole if it is at most twice as long as what is wanted, and
    else its end is needed; so is the end of the last text left. A text that stands twice is not cut: where no text
    fits, it is taken whole. Equal texts stay together, so that no validation text has been trained on.

    Raises:
        InputError: several documents, and all texts are equal.
    """
    distinct, text_of = np.unique(hashes, return_inverse=True)
    if len(distinct) == 1 < len(hashes):
        raise InputError("data.source: all documents hold the same text, so none can be set aside (data.validation)")
    bytes_of_text = np.bincount(text_of, weights=sizes)
    room, taken = fraction * sizes.sum(), np.zeros(len(distinct), dtype=bool)
    for text, size in enumerate(bytes_of_text):
        if size <= room:
            taken[text] = True
            room -= size
    if room < 0.9 * fraction * sizes.sum() and taken.any():
        return taken[text_of], None
    shortest = int(np.argmin(np.where(taken, np.inf, bytes_of_text)))
    places, is_last = np.flatnonzero(text_of == shortest), np.count_nonzero(~taken) == 1
    is_long = is_last or bytes_of_text[shortest] > 2 * room
    if is_long and len(places) == 1:
        return taken[text_of], int(places[0])
    if not is_long or not taken.any():
        taken[shortest] = True
    return taken[text_of], None


def split_document(document: Document, fraction: float) -> tuple[Document, Document]:
    """Cut a document in two, at the first line that begins in its last `fraction`, or else at the last line.

    Where the last line is more than twice as long, it is cut itself, after a space.

    Raises:
        InputError: the document is a single character, or a conversation.
    """
    text = document.text
    if document.messages is not None:
        raise InputError("data.source: a single conversation cannot be split for validation (data.validation)")
    if len(text) < 2:
        raise InputError("data.source: a single character cannot be split for validation (data.validation)")
    target = min(max(int(len(text) * (1 - fraction)), 1), len(text) - 1)
    cut = text.find("\n", target - 1) + 1
    if cut in (0, len(text)):
        cut = text.rfind("\n", 0, target) + 1
        if cut == 0 or len(text) - cut > 2 * (len(text) - target):
            cut = text.rfind(" ", max(cut, 2 * target - len(text)), target) + 1 or target
    return Document(f"{document.name} (first part)", text[:cut]), Document(f"{document.name} (last part)", text[cut:])
