"""A packed text: all tokens in one memory-mapped array. Writes packed texts, and cuts them into fixed-size blocks.

A document becomes the start token and then the document's tokens. So a model predicts the first token of a text from
the start token, and after the last token of a text it predicts the next start token.
"""

import contextlib
import copy
import itertools
import json
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Annotated, Any

import numpy as np
import safetensors.numpy
import torch
from numpy.typing import NDArray
from pydantic import StringConstraints
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from multilin.data.chat import ConversationEncoder
from multilin.data.encoding import Encoder, make_encoder
from multilin.data.files import Document
from multilin.data.tokenizers import start_token_id, token_byte_lengths, tokenizer_hash
from multilin.errors import InputError, plural
from multilin.files import atomic_folder
from multilin.settings.inputs import check_regular

IGNORED_LABEL = -100
BLOCK_FIELDS = ("input_ids", "labels", "document_ids")

_Printable = Annotated[str, StringConstraints(pattern=r"^\PC*$")]  # no control characters, which a terminal would obey
TOKENS, ANSWERS, INDEX, DESCRIPTION = "tokens.bin", "answers.bin", "index.safetensors", "packed.json"
COUNTED_AT_ONCE = 2**22  # tokens
BATCH_CHARACTERS = 2**22  # tokenised at once


@dataclass(frozen=True)
class Description:
    """The content of packed.json."""

    num_tokens: int
    num_documents: int
    num_bytes: int  # UTF-8 bytes of the text
    counted_bytes: int  # sum of the byte lengths of all tokens; equal to num_bytes for byte-level tokenizers
    dtype: str
    vocab_size: int
    start_token_id: int
    pad_token_id: int
    tokenizer_hash: str
    is_chat: bool = False  # whether the documents are conversations, of which only answers are scored
    summary: _Printable = ""  # for a validation text: which part of the source it is, in words
    num_cut: int = 0  # for a validation text: number of documents of which only the end is in it


def merged(descriptions: Sequence[Description]) -> Description:
    """The description of one text that joins several packed texts of the same tokenizer."""
    counts = ("num_tokens", "num_documents", "num_bytes", "counted_bytes", "num_cut")
    summary = " + ".join(one.summary for one in descriptions if one.summary)
    sums = {name: sum(getattr(one, name) for one in descriptions) for name in counts}
    return replace(descriptions[0], **sums, summary=summary)


def write_description(folder: Path, description: Description) -> None:
    """Write packed.json."""
    (folder / DESCRIPTION).write_text(json.dumps(asdict(description), indent=2), encoding="utf-8")


class PackedText:
    """A packed corpus: all tokens in one array, and the places of the documents in this array.

    Attributes:
        folder: the folder of the corpus's files.
        description: the content of packed.json.
        num_tokens, num_documents: numbers of tokens, start tokens included, and of documents.
        num_bytes: UTF-8 bytes of the exact text of all documents.
        tokens: (num_tokens,) uint16 or uint32, memory-mapped.
        document_starts: (num_documents,) int64, the index of each document's start token, memory-mapped.
        document_bytes: (num_documents,) int64, UTF-8 bytes of each document's text, memory-mapped.
    """

    def __init__(self, folder: Path, description: Description, index: dict[str, NDArray[np.int64]]) -> None:
        self.folder, self.description = folder, description
        self.num_tokens, self.num_documents = description.num_tokens, description.num_documents
        self.num_bytes = description.num_bytes
        self.document_starts, self.document_bytes = index["document_starts"], index["document_bytes"]
        self.tokens = _mapped(folder / TOKENS, description.num_tokens, description.dtype)
        self.is_answer = None  # (num_tokens,) bool, memory-mapped: tokens of answers; None where all are scored
        if description.is_chat:
            self.is_answer = _mapped(folder / ANSWERS, description.num_tokens, "bool")
        self._token_bytes = index["token_bytes"]

    @classmethod
    def open(cls, folder: Path) -> "PackedText":
        """Open a folder that `pack` wrote.

        Raises:
            InputError: the folder holds no packed text, or the packed text is damaged.
        """
        folder = Path(folder)
        for path in (folder / name for name in (DESCRIPTION, INDEX, TOKENS, ANSWERS)):
            if path.exists():
                check_regular(path, "")
        try:
            description = Description(**json.loads((folder / DESCRIPTION).read_text(encoding="utf-8")))
            index = {name: tensor.numpy() for name, tensor in load_file(folder / INDEX).items()}  # memory-mapped
            item_bytes = {TOKENS: np.dtype(description.dtype).itemsize} | ({ANSWERS: 1} if description.is_chat else {})
            sizes = {name: (folder / name).stat().st_size for name in item_bytes}
        except FileNotFoundError as error:
            raise InputError(f"{folder}: no packed text, as {Path(error.filename or folder).name} is missing") from None
        except (ValueError, TypeError, SafetensorError) as error:
            raise InputError(f"{folder}: damaged ({error}); delete this folder to prepare the text again") from None
        for name, size in sizes.items():
            if size != (expected := description.num_tokens * item_bytes[name]):
                difference = f"{plural(size, 'byte')} instead of {expected}"
                raise InputError(f"{folder}: {name} has {difference}; delete this folder to prepare the text again")
        return cls(folder, description, index)

    def every_other(self, first: int) -> "PackedText":
        """Every second document, beginning with the first (0) or the second (1), as a text in memory.

        If the text holds ends of documents, the result is the second (0) or first (1) half of each end instead.
        """
        starts, sizes = self.document_starts, np.diff(self.document_starts, append=self.num_tokens)
        in_part = np.repeat(np.arange(self.num_documents) % 2 == first, sizes)
        if self.description.num_cut:
            middles = starts + (sizes + 1) // 2
            in_part = (np.arange(self.num_tokens) < np.repeat(middles, sizes)) == first
            in_part[starts] = True
        kept = np.add.reduceat(in_part, starts, dtype=np.int64)
        counted = self.token_sizes(self.tokens)
        counted[starts] = 0
        shares = np.add.reduceat(counted * in_part, starts) / np.maximum(np.add.reduceat(counted, starts), 1)
        part = copy.copy(self)
        part.tokens = self.tokens[in_part]
        part.is_answer = None if self.is_answer is None else self.is_answer[in_part]
        part.document_bytes = np.rint(self.document_bytes * shares).astype(np.int64)[kept > 0]
        part.document_starts = np.cumsum(kept[kept > 0]) - kept[kept > 0]
        part.num_tokens, part.num_documents = len(part.tokens), len(part.document_starts)
        part.num_bytes = int(part.document_bytes.sum())
        counted = part.tokens if self.is_answer is not None else np.delete(part.tokens, part.document_starts)
        part.description = replace(
            self.description, num_tokens=part.num_tokens, num_documents=part.num_documents, num_bytes=part.num_bytes,
            counted_bytes=int(self.token_sizes(counted).sum()), summary=f"one half of: {self.description.summary}",
        )  # fmt: skip
        return part

    @property
    def shards(self) -> Iterator["PackedText"]:
        """Yield this text, since a packed text is a single shard."""
        yield self

    def blocks(self, block_size: int) -> "Blocks":
        """Blocks of this size, see `Blocks`."""
        return Blocks(self, block_size)

    def describe(self) -> dict[str, Any]:
        """The description as plain data, for a run's data.json."""
        return asdict(self.description)

    def token_counts(self) -> NDArray[np.int64]:
        """(vocab_size,) how often each token occurs."""
        counts = np.zeros(self.description.vocab_size, dtype=np.int64)
        for first in range(0, self.num_tokens, COUNTED_AT_ONCE):
            counts += np.bincount(self.tokens[first : first + COUNTED_AT_ONCE], minlength=len(counts))
        return counts

    def count_cuts(self, block_size: int) -> tuple[int, int, int]:
        """Counts of conversations: all, longer than a block, and without an answer after they are cut."""
        assert self.is_answer is not None
        sizes = np.diff(self.document_starts, append=self.num_tokens)
        bounds = zip(self.document_starts, self.document_starts + np.minimum(sizes, block_size), strict=True)
        num_lost = sum(not self.is_answer[start:end].any() for start, end in bounds)
        return len(sizes), int((sizes > block_size).sum()), num_lost

    def document_of(self, start: int, stop: int) -> NDArray[np.int64]:
        """(stop - start,) the index of the document of each token of tokens[start:stop]."""
        first, last = np.searchsorted(self.document_starts, [start, stop - 1], side="right") - 1
        ends = np.append(self.document_starts[first + 1 : last + 1], stop)
        return np.repeat(np.arange(first, last + 1), np.diff(ends, prepend=start))

    def opening(self, document: int, most: int) -> list[int]:
        """At most `most` tokens of a document, beginning after its start token."""
        start, stop = np.append(self.document_starts, self.num_tokens)[document : document + 2]
        ids: list[int] = self.tokens[start + 1 : min(stop, start + 1 + most)].tolist()
        return ids

    def token_sizes(self, tokens: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        """Bytes of text in each token; for tokenizers that are not byte-level, multiply by `bytes_per_counted`."""
        return np.asarray(self._token_bytes[tokens])

    @property
    def bytes_per_counted(self) -> float:
        """UTF-8 bytes of the text per byte that `token_sizes` counts; 1 for byte-level tokenizers."""
        description = self.description
        if description.counted_bytes in (description.num_bytes, 0):
            return 1.0
        return description.num_bytes / description.counted_bytes


def _mapped(path: Path, size: int, dtype: str) -> NDArray[Any]:
    """The array in a file, memory-mapped. The file does not stay open, as it would with `numpy.memmap`."""
    kind = {"dtype": getattr(torch, dtype), "device": "cpu"}
    numbers: NDArray[Any] = torch.from_file(str(path), shared=False, size=size, **kind).numpy()
    numbers.flags.writeable = False
    return numbers


class Blocks(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Fixed-size blocks that overlap by one token.

    Block i covers tokens[i * (block_size - 1) :][:block_size]. Causal language models of transformers shift labels
    themselves, so every token of the text except the first is predicted exactly once.

    Conversations are never cut in two: a block holds as many whole conversations as fit and is then padded, and a
    conversation longer than a block is cut at its end. The labels of all tokens outside answers are -100.

    An item is {"input_ids", "labels", "document_ids"}, each (block_size,) int64; document_ids holds the index of each
    token's document. Tokens after the last whole block are left out. If `partial`, these tokens are a block too, padded
    with the padding token, labels -100 and the last document's index.

    Raises:
        InputError: the block size is below 2, or the text is too short: below one block, or two tokens if `partial`.
    """

    def __init__(self, packed: PackedText, block_size: int, *, partial: bool = False) -> None:
        if block_size < 2:
            raise InputError(f"block_size: {block_size} given, but a block needs at least 2 tokens")
        predicted = packed.num_tokens - 1
        self.packed, self.block_size = packed, block_size
        self._spans: list[tuple[int, int]] | None = None
        if packed.description.is_chat:
            assert packed.is_answer is not None
            spans = whole_documents(packed.document_starts, packed.num_tokens, block_size)
            # Blocks without an answer would teach nothing, and a step of such blocks alone would have no loss.
            self._spans = [span for span in spans if packed.is_answer[slice(*span)].any()]
            self._length = len(self._spans)
            return
        self._length = -(-predicted // (block_size - 1)) if partial else predicted // (block_size - 1)
        if self._length == 0:
            raise InputError(
                f"block_size: {block_size} given, but the text {packed.folder.name} has only {packed.num_tokens} "
                "tokens; give a smaller block or more text"
            )

    def __len__(self) -> int:
        return self._length

    def span(self, index: int) -> tuple[int, int]:
        """The index of a block's first token, and the index after its last token."""
        if not 0 <= index < self._length:
            raise IndexError(f"block {index} does not exist; there are {self._length} blocks, counted from 0")
        if self._spans is not None:
            return self._spans[index]
        start = index * (self.block_size - 1)
        return start, min(start + self.block_size, self.packed.num_tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start, stop = self.span(index)
        tokens, missing = self.packed.tokens[start:stop].astype(np.int64), (0, self.block_size - (stop - start))
        is_answer = self.packed.is_answer
        labels = tokens if is_answer is None else np.where(is_answer[start:stop], tokens, IGNORED_LABEL)
        fields = (
            np.pad(tokens, missing, constant_values=self.packed.description.pad_token_id),
            np.pad(labels, missing, constant_values=IGNORED_LABEL),
            np.pad(self.packed.document_of(start, stop), missing, mode="edge"),
        )
        return dict(zip(BLOCK_FIELDS, map(torch.from_numpy, fields), strict=True))


def whole_documents(starts: NDArray[np.int64], num_tokens: int, block_size: int) -> list[tuple[int, int]]:
    """Start and end of each block. A block holds whole documents; a document longer than a block is cut at its end.

    `starts`, (documents,), holds the indices of the documents' first tokens.
    """
    spans: list[tuple[int, int]] = []
    for start, stop in itertools.pairwise([*starts.tolist(), num_tokens]):
        if spans and stop - spans[-1][0] <= block_size:
            spans[-1] = (spans[-1][0], stop)
        else:
            spans.append((start, min(stop, start + block_size)))
    return spans


def check_cuts(packed: Any, block_size: int, field: str) -> None:
    """Warn of conversations, in one or several packed texts, that are cut because they are longer than a block.

    Raises:
        InputError: no answer is left; the message begins with the setting `field`.
    """
    if not packed.description.is_chat:
        return
    number, num_cut, num_lost = map(sum, zip(*(shard.count_cuts(block_size) for shard in packed.shards), strict=True))
    if num_lost == number:
        raise InputError(f"{field}: no answer begins within a block of {block_size} tokens (model.n_positions)")
    if num_cut:
        warnings.warn(
            f"{field}: {num_cut:,} of {plural(number, 'conversation')} are longer than a block of {block_size} tokens "
            f"(model.n_positions) and are cut there; {num_lost:,} of these lose all answers",
            stacklevel=2,
        )


def pack(
    documents: Iterable[Document],
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    progress: Callable[[int], None] = lambda done: None,
) -> PackedText:
    """Tokenise documents and write them as one packed text.

    Args:
        documents: read once; memory holds the index, a few megabytes of text, and one whole document.
        tokenizer: a tokenizer with an end-of-text token, which starts every document.
        folder: a folder that does not exist yet; the folder appears when its content is complete.
        progress: called repeatedly with the UTF-8 bytes packed so far.

    Raises:
        InputError: the folder exists, or there is no document.
    """
    if folder.exists():
        raise InputError(f"{folder} exists already; give a new folder")
    with atomic_folder(folder) as partial:
        pack_into(documents, tokenizer, partial, progress)
    return PackedText.open(folder)


def pack_into(
    documents: Iterable[Document],
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    progress: Callable[[int], None] = lambda done: None,
    encoder: Encoder | None = None,
) -> None:
    """Like `pack`, but into an empty folder. An encoder of `make_encoder` can be reused, since it remembers words."""
    documents = iter(documents)
    if (first := next(documents, None)) is None:
        raise InputError("there is no document to pack")
    documents, is_chat = itertools.chain([first], documents), first.messages is not None
    with (folder / TOKENS).open("wb") as tokens, contextlib.ExitStack() as stack:
        writer = _Writer(tokenizer, tokens)
        if is_chat:
            answers, conversations = stack.enter_context((folder / ANSWERS).open("wb")), ConversationEncoder(tokenizer)
            for document in documents:
                answers.write(writer.add_conversation(document, conversations).tobytes())
                progress(writer.num_bytes)
        else:
            encoder = encoder or make_encoder(tokenizer)
            for batch in _batches(documents, encoder):
                writer.add_texts(batch, encoder)
                progress(writer.num_bytes)
    writer.write_index(folder, is_chat)


def concatenate(texts: Sequence[PackedText], folder: Path) -> None:
    """Join several packed texts of one tokenizer into one packed text, and write it into an empty folder."""
    first = texts[0].description
    for name in (TOKENS, ANSWERS) if first.is_chat else (TOKENS,):
        with (folder / name).open("wb") as stream:
            for text in texts:
                with (text.folder / name).open("rb") as part:
                    shutil.copyfileobj(part, stream)
    before = np.cumsum([0, *(text.num_tokens for text in texts)])
    index = {
        "document_starts": np.concatenate([text.document_starts + n for text, n in zip(texts, before, strict=False)]),
        "document_bytes": np.concatenate([text.document_bytes for text in texts]),
        "token_bytes": np.array(texts[0].token_sizes(np.arange(first.vocab_size))),
    }
    safetensors.numpy.save_file(index, folder / INDEX)
    write_description(folder, merged([text.description for text in texts]))


def _batches(documents: Iterable[Document], encoder: Encoder) -> Iterator[list[tuple[int, str]]]:
    """Batches of pieces of documents; each piece has its index in its document, from 0."""
    batch: list[tuple[int, str]] = []
    characters = 0
    for document in documents:
        for number, text in enumerate(encoder.pieces(document.text)):
            batch.append((number, text))
            characters += len(text)
            if characters >= BATCH_CHARACTERS:
                yield batch
                batch, characters = [], 0
    if batch:
        yield batch


class _Writer:
    """Writes tokens to a file, and counts tokens and documents for the index."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, stream: IO[bytes]) -> None:
        self._tokenizer, self._stream, self._start = tokenizer, stream, start_token_id(tokenizer)
        self._token_bytes = np.array(token_byte_lengths(tokenizer), dtype=np.int64)
        self._dtype = np.dtype(np.uint16 if len(self._token_bytes) <= 2**16 else np.uint32)
        self.num_bytes = self._num_tokens = self._counted_bytes = self._unknown = 0
        self._starts: list[NDArray[np.int64]] = []
        self._bytes: list[int] = []

    def add_conversation(self, document: Document, conversations: ConversationEncoder) -> NDArray[np.bool_]:
        """Write a conversation; return for each of its tokens whether the token belongs to an answer."""
        assert document.messages is not None, "texts and conversations cannot be packed together"
        ids, is_answer = conversations.encode(document.messages, document.name)
        if ids[0] not in (self._start, self._tokenizer.bos_token_id):  # a template may write the start token itself
            ids, is_answer = [self._start, *ids], [False, *is_answer]
        row = np.array(ids)
        size = int(self._token_bytes[row].sum())
        self._bytes.append(size)
        self._append(row, np.zeros(1, np.int64), counted_bytes=size, num_bytes=size)
        return np.array(is_answer, dtype=bool)

    def add_texts(self, batch: list[tuple[int, str]], encoder: Encoder) -> None:
        """Write pieces of documents. Each piece has its index in its document; index 0 begins a new document."""
        ids, counts = encoder.encode([text for _, text in batch])
        places = (np.cumsum(counts) - counts)[[number == 0 for number, _ in batch]]
        sizes = [len(text.encode()) for _, text in batch]
        for (number, _), size in zip(batch, sizes, strict=True):
            if number == 0:
                self._bytes.append(0)
            self._bytes[-1] += size
        self._unknown += int((ids == self._tokenizer.unk_token_id).sum())
        row, starts = np.insert(ids, places, self._start), places + np.arange(len(places))
        self._append(row, starts, counted_bytes=int(self._token_bytes[ids].sum()), num_bytes=sum(sizes))

    def _append(self, row: NDArray[np.int64], starts: NDArray[np.int64], *, counted_bytes: int, num_bytes: int) -> None:
        self._starts.append(self._num_tokens + starts)
        self._stream.write(row.astype(self._dtype).tobytes())
        self._num_tokens += len(row)
        self._counted_bytes += counted_bytes
        self.num_bytes += num_bytes

    def write_index(self, folder: Path, is_chat: bool) -> None:
        if self._unknown:
            warnings.warn(
                f"{self._unknown} of {self._num_tokens} tokens are {self._tokenizer.unk_token}: the tokenizer cannot "
                "spell this text, so losses and bits per byte are too low and cannot be compared",
                stacklevel=2,
            )
        starts, sizes = np.concatenate(self._starts), np.array(self._bytes, dtype=np.int64)
        index = {"document_starts": starts, "document_bytes": sizes, "token_bytes": self._token_bytes}
        safetensors.numpy.save_file(index, folder / INDEX)
        description = Description(
            num_tokens=self._num_tokens, num_documents=len(starts),
            num_bytes=self.num_bytes, counted_bytes=self._counted_bytes,
            dtype=self._dtype.name, vocab_size=len(self._token_bytes),
            start_token_id=self._start, pad_token_id=int(self._tokenizer.pad_token_id),
            tokenizer_hash=tokenizer_hash(self._tokenizer), is_chat=is_chat,
        )  # fmt: skip
        write_description(folder, description)
