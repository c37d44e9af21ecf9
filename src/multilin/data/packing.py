"""Documents packed once into one memory-mapped row of tokens, and the fixed-size blocks models read from it.

Every document becomes its start token followed by its tokens, so that the first token of a text is predicted from
something, and where a text ends the next start token is predicted.
"""

import contextlib
import functools
import itertools
import json
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from multilin.data.chat import encode_conversation, whole_documents
from multilin.data.encoding import Encoder, make_encoder
from multilin.data.files import Document
from multilin.data.tokenizers import start_token_id, token_byte_lengths, tokenizer_hash
from multilin.errors import InputError, plural
from multilin.files import atomic_folder
from multilin.settings.inputs import check_regular

BATCH_CHARACTERS = 2**22
IGNORED_LABEL = -100
BLOCK_FIELDS = ("input_ids", "labels", "document_ids")

_TOKENS, _ANSWERS, _INDEX, _DESCRIPTION = "tokens.bin", "answers.bin", "index.safetensors", "packed.json"


@dataclass(frozen=True)
class Description:
    """The content of packed.json."""

    num_tokens: int
    num_documents: int
    num_bytes: int  # UTF-8 bytes of the text
    counted_bytes: int  # the same as the tokens' byte lengths sum up to: equal for byte-level tokenizers
    dtype: str
    vocab_size: int
    start_token_id: int
    pad_token_id: int
    tokenizer_hash: str
    is_chat: bool = False  # whether the documents are conversations, of which answers alone are scored


class PackedText:
    """A packed corpus: all tokens in a row, and where the documents are.

    Attributes:
        folder: where it lies.
        description: the content of packed.json.
        num_tokens, num_documents: the start tokens included.
        num_bytes: UTF-8 bytes of the exact text of all documents.
        tokens: (num_tokens,) uint16 or uint32, memory-mapped.
        document_starts: (num_documents,) int64, the place of each document's start token.
        document_bytes: (num_documents,) int64, UTF-8 bytes of each document's text.
    """

    def __init__(self, folder: Path, description: Description, index: dict[str, NDArray[np.int64]]) -> None:
        self.folder, self.description = folder, description
        self.num_tokens, self.num_documents = description.num_tokens, description.num_documents
        self.num_bytes = description.num_bytes
        self.document_starts, self.document_bytes = index["document_starts"], index["document_bytes"]
        self.tokens = np.memmap(folder / _TOKENS, dtype=description.dtype, mode="r", shape=(description.num_tokens,))
        self.is_answer = None  # (num_tokens,) bool, memory-mapped: tokens of answers; None where all are scored
        if description.is_chat:
            self.is_answer = np.memmap(folder / _ANSWERS, dtype=bool, mode="r", shape=(description.num_tokens,))
        self._token_bytes = index["token_bytes"]

    @classmethod
    def open(cls, folder: Path) -> "PackedText":
        """Open a folder that `pack` wrote.

        Raises:
            InputError: the folder holds no packing, or a damaged one.
        """
        folder = Path(folder)
        for path in (folder / name for name in (_DESCRIPTION, _INDEX, _TOKENS)):
            if path.exists():
                check_regular(path, "")
        try:
            description = Description(**json.loads((folder / _DESCRIPTION).read_text(encoding="utf-8")))
            index = safetensors.numpy.load_file(folder / _INDEX)
            size = (folder / _TOKENS).stat().st_size
        except FileNotFoundError as error:
            raise InputError(f"{folder}: no packed text, as {Path(error.filename or folder).name} is missing") from None
        except (ValueError, TypeError, SafetensorError) as error:
            raise InputError(f"{folder}: damaged packed text ({error}); delete it to prepare it again") from None
        if description.is_chat and not (folder / _ANSWERS).is_file():
            raise InputError(f"{folder}: no packed text, as {_ANSWERS} is missing")
        if size != (expected := description.num_tokens * np.dtype(description.dtype).itemsize):
            difference = f"{plural(size, 'byte')} instead of {expected}"
            raise InputError(f"{folder}: {_TOKENS} has {difference}; delete it to prepare it again")
        return cls(folder, description, index)

    def __reduce__(self) -> tuple[Callable[[Path], "PackedText"], tuple[Path]]:
        return PackedText.open, (self.folder,)  # a worker process maps the file itself instead of receiving a copy

    def blocks(self, block_size: int) -> "Blocks":
        """Blocks of this size, see `Blocks`."""
        return Blocks(self, block_size)

    def describe(self) -> dict[str, Any]:
        """The description as plain data, for a run's data.json."""
        return asdict(self.description)

    def token_counts(self) -> NDArray[np.int64]:
        """(vocab_size,) how often each token occurs."""
        counts = np.zeros(self.description.vocab_size, dtype=np.int64)
        for first in range(0, self.num_tokens, BATCH_CHARACTERS):
            counts += np.bincount(self.tokens[first : first + BATCH_CHARACTERS], minlength=len(counts))
        return counts

    def document_of(self, start: int, stop: int) -> NDArray[np.int64]:
        """(stop - start,) the number of the document each token of tokens[start:stop] belongs to."""
        first, last = np.searchsorted(self.document_starts, [start, stop - 1], side="right") - 1
        ends = np.append(self.document_starts[first + 1 : last + 1], stop)
        return np.repeat(np.arange(first, last + 1), np.diff(ends, prepend=start))

    def token_sizes(self, tokens: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        """Bytes that each token stands for; for tokenizers that are not byte-level, to be times `bytes_per_counted`."""
        return np.asarray(self._token_bytes[tokens])

    @property
    def bytes_per_counted(self) -> float:
        """UTF-8 bytes of the text per byte of its tokens' names; 1 for byte-level tokenizers."""
        description = self.description
        if description.counted_bytes in (description.num_bytes, 0):
            return 1.0
        return description.num_bytes / description.counted_bytes


class Blocks(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Fixed-size blocks that overlap by one token.

    Block i covers tokens[i * (block_size - 1) :][:block_size]. A causal language model of transformers shifts the
    labels itself, so over all blocks every token but the very first is predicted exactly once.

    Conversations are never cut in two: a block is padded after as many as fit, and of one that is longer than a block
    the rest is left out. The labels of all tokens but those of answers are -100.

    An item is {"input_ids", "labels", "document_ids"}, each (block_size,) int64; document_ids numbers the document
    each token belongs to. The tokens after the last whole block are left out, unless `partial`: then the last block is
    padded with the padding token, labels -100 and the last document's number.

    Raises:
        InputError: the block size is below 2, or the text is shorter than one block (two tokens if `partial`).
    """

    def __init__(self, packed: PackedText, block_size: int, *, partial: bool = False) -> None:
        if block_size < 2:
            raise InputError(f"block_size: {block_size} given, but a block needs at least 2 tokens")
        predicted = packed.num_tokens - 1
        self.packed, self.block_size = packed, block_size
        self._spans = (
            None if packed.is_answer is None else whole_documents(packed.document_starts, packed.num_tokens, block_size)
        )
        if self._spans is not None:
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
        """First token of a block and the one after its last."""
        if not 0 <= index < self._length:
            raise IndexError(f"block {index} of {self._length}")
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


def pack(
    documents: Iterable[Document],
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    progress: Callable[[int], None] | None = None,
) -> PackedText:
    """Tokenise documents and write them as one packed text.

    Args:
        documents: read once; besides the index a few megabytes are held at a time (and a whole document).
        tokenizer: with an end-of-text token, which starts every document.
        folder: a folder that does not exist yet; it appears when it is complete.
        progress: called now and then with the UTF-8 bytes packed so far.

    Raises:
        InputError: the folder exists, or there is no document.
    """
    if folder.exists():
        raise InputError(f"{folder} exists already; a text is packed into a new folder")
    with atomic_folder(folder) as partial:
        documents = iter(documents)
        first = next(documents, None)
        documents = documents if first is None else itertools.chain([first], documents)
        with (partial / _TOKENS).open("wb") as stream, contextlib.ExitStack() as stack:
            writer = _Writer(tokenizer, stream.write)
            if first is not None and first.messages is not None:
                writer.write_answers = stack.enter_context((partial / _ANSWERS).open("wb")).write
                steps = (functools.partial(writer.add_conversation, document) for document in documents)
            else:
                steps = (functools.partial(writer.add, batch) for batch in _batches(documents, writer.encoder))
            for step in steps:
                step()
                if progress is not None:
                    progress(writer.num_bytes)
        writer.write_index(partial)
    return PackedText.open(folder)


def _batches(documents: Iterable[Document], encoder: Encoder) -> Iterator[list[tuple[int, str]]]:
    """Lists of pieces, each with its number in its document."""
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
    def __init__(self, tokenizer: PreTrainedTokenizerFast, write: Callable[[bytes], object]) -> None:
        self.encoder, self.num_bytes = make_encoder(tokenizer), 0
        self._tokenizer, self._write = tokenizer, write
        self._token_bytes = np.array(token_byte_lengths(tokenizer), dtype=np.int64)
        self._dtype = np.dtype(np.uint16 if len(self._token_bytes) <= 2**16 else np.uint32)
        self._num_tokens = self._counted_bytes = self._unknown = 0
        self._starts: list[NDArray[np.int64]] = []
        self._bytes: list[int] = []
        self.write_answers: Callable[[bytes], object] | None = None

    def add_conversation(self, document: Document) -> None:
        assert document.messages is not None, "texts and conversations are packed apart"
        ids, is_answer = encode_conversation(document.messages, self._tokenizer, document.name)
        start = start_token_id(self._tokenizer)
        if ids[0] not in (start, self._tokenizer.bos_token_id):  # which a template may write itself
            ids, is_answer = [start, *ids], [False, *is_answer]
        assert self.write_answers is not None
        self.write_answers(np.array(is_answer, dtype=bool).tobytes())
        row = np.array(ids)
        self._starts.append(np.array([self._num_tokens]))
        self._write(row.astype(self._dtype).tobytes())
        self._num_tokens += len(row)
        self._counted_bytes += int(self._token_bytes[row].sum())
        self._bytes.append(int(self._token_bytes[row].sum()))
        self.num_bytes += self._bytes[-1]

    def add(self, batch: list[tuple[int, str]]) -> None:
        ids, counts = self.encoder.encode([text for _, text in batch])
        places = (np.cumsum(counts) - counts)[[number == 0 for number, _ in batch]]
        self._starts.append(self._num_tokens + places + np.arange(len(places)))
        row = np.insert(ids, places, start_token_id(self._tokenizer))
        self._write(row.astype(self._dtype).tobytes())
        self._num_tokens += len(row)
        self._counted_bytes += int(self._token_bytes[ids].sum())
        self._unknown += int((ids == self._tokenizer.unk_token_id).sum())
        for number, text in batch:
            if number == 0:
                self._bytes.append(0)
            size = len(text.encode())
            self._bytes[-1] += size
            self.num_bytes += size

    def write_index(self, folder: Path) -> None:
        if not self._bytes:
            raise InputError("there is no document to pack")
        if self._unknown:
            warnings.warn(
                f"{self._unknown} of {self._num_tokens} tokens are {self._tokenizer.unk_token}: the tokenizer cannot "
                "spell this text, so losses and bits per byte are too low to compare",
                stacklevel=2,
            )
        starts, sizes = np.concatenate(self._starts), np.array(self._bytes, dtype=np.int64)
        index = {"document_starts": starts, "document_bytes": sizes, "token_bytes": self._token_bytes}
        safetensors.numpy.save_file(index, folder / _INDEX)
        description = Description(
            num_tokens=self._num_tokens, num_documents=len(starts),
            num_bytes=self.num_bytes, counted_bytes=self._counted_bytes,
            dtype=self._dtype.name, vocab_size=len(self._token_bytes),
            start_token_id=start_token_id(self._tokenizer), pad_token_id=int(self._tokenizer.pad_token_id),
            tokenizer_hash=tokenizer_hash(self._tokenizer), is_chat=self.write_answers is not None,
        )  # fmt: skip
        (folder / _DESCRIPTION).write_text(json.dumps(asdict(description), indent=2), encoding="utf-8")
