"""Documents packed once into one row of tokens.

Every document becomes its start token followed by its tokens, so that the first token of a text is predicted from
something, and where a text ends the next start token is predicted.
"""

import contextlib
import functools
import hashlib
import itertools
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from multilin.data.chat import ConversationEncoder
from multilin.data.encoding import Encoder, make_encoder
from multilin.data.files import Document
from multilin.data.packed_text import ANSWERS, INDEX, TOKENS, Description, PackedText, merged, write_description
from multilin.data.tokenizers import start_token_id, token_byte_lengths, tokenizer_hash
from multilin.errors import InputError
from multilin.files import atomic_folder

BATCH_CHARACTERS = 2**22


def pack(
    documents: Iterable[Document],
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    progress: Callable[[int], None] = lambda done: None,
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
        pack_into(documents, tokenizer, partial, progress)
    return PackedText.open(folder)


def text_hash(content: bytes) -> int:
    """A hash of a text below 2^64, which decides on which side of a split the text is."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")


def pack_into(
    documents: Iterable[Document],
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    progress: Callable[[int], None] = lambda done: None,
    encoder: Encoder | None = None,
) -> None:
    """Like `pack`, into an empty folder; an encoder of `make_encoder` may be reused, as it remembers words."""
    documents = iter(documents)
    first = next(documents, None)
    documents = documents if first is None else itertools.chain([first], documents)
    with (folder / TOKENS).open("wb") as stream, contextlib.ExitStack() as stack:
        writer = _Writer(tokenizer, stream.write, encoder or make_encoder(tokenizer))
        if first is not None and first.messages is not None:
            writer.write_answers = stack.enter_context((folder / ANSWERS).open("wb")).write
            steps = map(writer.add_conversation, documents)
        else:
            steps = map(writer.add, _batches(documents, writer.encoder))
        for _ in steps:
            progress(writer.num_bytes)
    writer.write_index(folder)


def concatenate(texts: Sequence[PackedText], folder: Path) -> None:
    """Write several packed texts of one tokenizer into an empty folder, as one packed text."""
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
    def __init__(self, tokenizer: PreTrainedTokenizerFast, write: Callable[[bytes], object], encoder: Encoder) -> None:
        self.encoder, self.num_bytes = encoder, 0
        self._tokenizer, self._write = tokenizer, write
        self._token_bytes = np.array(token_byte_lengths(tokenizer), dtype=np.int64)
        self._dtype = np.dtype(np.uint16 if len(self._token_bytes) <= 2**16 else np.uint32)
        self._num_tokens = self._counted_bytes = self._unknown = 0
        self._starts: list[NDArray[np.int64]] = []
        self._bytes: list[int] = []
        self.write_answers: Callable[[bytes], object] | None = None

    @functools.cached_property
    def _conversations(self) -> ConversationEncoder:
        return ConversationEncoder(self._tokenizer)

    def add_conversation(self, document: Document) -> None:
        assert document.messages is not None, "texts and conversations are packed apart"
        ids, is_answer = self._conversations.encode(document.messages, document.name)
        start = start_token_id(self._tokenizer)
        if ids[0] not in (start, self._tokenizer.bos_token_id):  # which a template may write itself
            ids, is_answer = [start, *ids], [False, *is_answer]
        assert self.write_answers is not None
        self.write_answers(np.array(is_answer, dtype=bool).tobytes())
        row = np.array(ids)
        self._bytes.append(int(self._token_bytes[row].sum()))
        self._append(row, np.zeros(1, np.int64), counted_bytes=self._bytes[-1], num_bytes=self._bytes[-1])

    def add(self, batch: list[tuple[int, str]]) -> None:
        ids, counts = self.encoder.encode([text for _, text in batch])
        places = (np.cumsum(counts) - counts)[[number == 0 for number, _ in batch]]
        sizes = [len(text.encode()) for _, text in batch]
        for (number, _), size in zip(batch, sizes, strict=True):
            if number == 0:
                self._bytes.append(0)
            self._bytes[-1] += size
        self._unknown += int((ids == self._tokenizer.unk_token_id).sum())
        row = np.insert(ids, places, start_token_id(self._tokenizer))
        starts = places + np.arange(len(places))
        self._append(row, starts, counted_bytes=int(self._token_bytes[ids].sum()), num_bytes=sum(sizes))

    def _append(self, row: NDArray[np.int64], starts: NDArray[np.int64], *, counted_bytes: int, num_bytes: int) -> None:
        self._starts.append(self._num_tokens + starts)
        self._write(row.astype(self._dtype).tobytes())
        self._num_tokens += len(row)
        self._counted_bytes += counted_bytes
        self.num_bytes += num_bytes

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
        safetensors.numpy.save_file(index, folder / INDEX)
        description = Description(
            num_tokens=self._num_tokens, num_documents=len(starts),
            num_bytes=self.num_bytes, counted_bytes=self._counted_bytes,
            dtype=self._dtype.name, vocab_size=len(self._token_bytes),
            start_token_id=start_token_id(self._tokenizer), pad_token_id=int(self._tokenizer.pad_token_id),
            tokenizer_hash=tokenizer_hash(self._tokenizer), is_chat=self.write_answers is not None,
        )  # fmt: skip
        write_description(folder, description)
