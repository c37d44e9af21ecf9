"""Documents set aside on disk, so that a source is read once, and their split into training and validation."""

import hashlib
import json
from array import array
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from multilin.data.files import Document
from multilin.errors import InputError

_REPORT_BYTES = 2**22


class Spool:
    """Documents in a file of JSON lines.

    Attributes:
        path: the file.
        hashes: (documents,) uint64, a hash of each text.
        sizes: (documents,) int64, UTF-8 bytes of each text.
    """

    def __init__(self, path: Path, hashes: NDArray[np.uint64], sizes: NDArray[np.int64]) -> None:
        self.path = path
        self.hashes = hashes
        self.sizes = sizes

    @classmethod
    def write(cls, documents: Iterable[Document], path: Path, progress: Callable[[int], None]) -> "Spool":
        """Write documents to a new file; `progress` is called now and then with the bytes of text so far."""
        hashes, sizes, total, reported = array("Q"), array("q"), 0, 0
        with path.open("w", encoding="utf-8") as stream:
            for document in documents:
                content = document.text.encode()
                hashes.append(int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big"))
                sizes.append(len(content))
                stream.write(json.dumps([document.name, document.text], ensure_ascii=False) + "\n")
                total += len(content)
                if total - reported >= _REPORT_BYTES:
                    progress(total)
                    reported = total
        progress(total)
        return cls(path, np.array(hashes, dtype=np.uint64), np.array(sizes, dtype=np.int64))

    def read(self, side: NDArray[np.bool_] | None = None) -> Iterator[Document]:
        """The documents in their order; with `side` (documents,) only those where it is true."""
        # JSON escapes newlines but not U+2028, which only str.splitlines takes for one; files split at \n alone.
        with self.path.open(encoding="utf-8", newline="\n") as stream:
            for index, line in enumerate(stream):
                if side is None or side[index]:
                    yield Document(*json.loads(line))


def validation_side(hashes: NDArray[np.uint64], sizes: NDArray[np.int64], fraction: float) -> NDArray[np.bool_]:
    """(documents,) which documents to validate on.

    In the order of the hashes, every text that still fits into `fraction` of all bytes is taken; where none fits, the
    smallest text. Equal texts stay together, so that no validation text has been trained on.

    Raises:
        InputError: all texts are equal.
    """
    distinct, text_of = np.unique(hashes, return_inverse=True)
    if len(distinct) == 1:
        raise InputError("data.source: all documents hold the same text, so none can be set aside (data.validation)")
    bytes_of_text = np.bincount(text_of, weights=sizes)
    room, taken = fraction * sizes.sum(), np.zeros(len(distinct), dtype=bool)
    for text, size in enumerate(bytes_of_text):
        if size <= room:
            taken[text] = True
            room -= size
    if not taken.any():
        taken[np.argmin(bytes_of_text)] = True
    return taken[text_of]


def split_document(document: Document, fraction: float) -> tuple[Document, Document]:
    """Cut a document in two: at the first line that begins in the last `fraction` of it, else at the last line.

    Raises:
        InputError: the document is a single character.
    """
    text = document.text
    if len(text) < 2:
        raise InputError("data.source: a single character cannot be split for validation (data.validation)")
    target = min(max(int(len(text) * (1 - fraction)), 1), len(text) - 1)
    cut = text.find("\n", target - 1) + 1
    if cut in (0, len(text)):
        cut = text.rfind("\n", 0, target) + 1 or target
    return Document(f"{document.name} (first part)", text[:cut]), Document(f"{document.name} (last part)", text[cut:])
