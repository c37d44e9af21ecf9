"""Decides which part of a text is set aside for validation.

If there are enough documents, whole documents are set aside, in the order of the hashes of their texts. If documents
are few or very unequal in size, the end of each long document is set aside instead.
"""

import hashlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.filesize import decimal

from multilin.data.files import Document
from multilin.data.packed_text import Description
from multilin.errors import InputError, plural, shorten

ENOUGH = 3
"""Number of average documents that the validation text should hold; large documents weigh more in the average."""
SHORTEST_END = 64
"""The smallest number of bytes that are set aside of a document that is cut."""
LONGEST_CHARACTER = 4
"""The largest number of bytes of a character in UTF-8."""
TRAIN, VALIDATION = 0, 1


def text_hash(content: bytes) -> int:
    """A hash of a text, below 2^64; the hash decides on which side of a split the text is."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")


@dataclass
class Census:
    """Hashes and sizes of documents, in the order of the documents; a `Split` is computed from these."""

    hashes: "array[int]" = field(default_factory=lambda: array("Q"))
    sizes: "array[int]" = field(default_factory=lambda: array("q"))
    num_bytes: int = 0
    sum_of_squares: int = 0
    is_chat: bool = False
    longest: tuple[int, int, str] = (0, 0, "")  # size, hash and name of the longest document

    def add(self, document: Document) -> None:
        """Count a document."""
        content = document.text.encode()
        number, size = text_hash(content), len(content)
        self.hashes.append(number)
        self.sizes.append(size)
        self.num_bytes += size
        self.sum_of_squares += size * size
        self.is_chat = document.messages is not None
        self.longest = max(self.longest, (size, number, document.name))


@dataclass(frozen=True)
class Split:
    """Decides which documents to train on and which to validate on. The order of the documents does not matter.

    Attributes:
        fraction: share of the bytes to validate on.
        whole: hashes of the texts that are set aside whole; None sets aside texts with hashes below fraction * 2^64.
        ends: hashes of the texts whose end is set aside.
        longest: a size in bytes; the end of each text above this size is set aside too.
        summary: which documents are set aside, in words.
    """

    fraction: float
    whole: frozenset[int] | None
    ends: frozenset[int] = frozenset()
    longest: float = float("inf")
    summary: str = ""

    @classmethod
    def of_all(cls, census: Census, fraction: float) -> "Split":
        """The split of a text, from a census of all its documents.

        First, the largest documents are removed until `fraction` of the remaining bytes has room for `ENOUGH` average
        documents, and for the largest remaining document. Of each removed document, the end is set aside, unless the
        document is a conversation or very short. The other documents, in the order of their hashes, are set aside whole
        as long as they fit into `fraction` of their total bytes. If they fill at most a tenth of this fraction, the
        shortest of the other documents is set aside too, unless it is long and ends of documents are set aside. Copies
        of a text are on the same side.

        Raises:
            InputError: all documents are the same conversation or character.
        """
        texts, first, text_of = np.unique(census.hashes, return_index=True, return_inverse=True)
        sizes = np.bincount(text_of, census.sizes)  # of all copies of a text
        can_cut = fraction * np.asarray(census.sizes)[first] >= SHORTEST_END
        is_cut = _are_long(sizes, fraction) & can_cut & (not census.is_chat)
        is_whole = _chosen(sizes, is_cut, fraction)
        if not (is_cut | is_whole).any():
            if census.is_chat or census.longest[0] <= LONGEST_CHARACTER:
                raise InputError(
                    "the only document is a conversation or a single character, which cannot be split for validation"
                )
            is_cut[:] = True
        summary = _summary(census, int(is_cut[text_of].sum()), int(is_whole[text_of].sum()), fraction)
        return cls(fraction, frozenset(texts[is_whole].tolist()), frozenset(texts[is_cut].tolist()), summary=summary)

    @classmethod
    def of_beginning(cls, census: Census, fraction: float) -> "Split | None":
        """The split of a text, from a census of its first documents; None if these documents do not suffice.

        They suffice if `fraction` of their bytes has room for `ENOUGH` average documents, and some are set aside.
        The hash of a text decides whether a document is set aside whole. The end of each long document is set aside.
        """
        hashes = np.asarray(census.hashes)
        num_whole = np.count_nonzero(hashes < fraction * 2**64)
        if ENOUGH * census.sum_of_squares > fraction * census.num_bytes**2 or not 0 < num_whole < len(hashes):
            return None
        longest, share = max(fraction * census.num_bytes / ENOUGH, SHORTEST_END / fraction), f"{100 * fraction:g} %"
        summary = f"{share} of the documents"
        if not census.is_chat:
            summary += f"; of each document above {decimal(int(longest))}, its last {share}"
        return cls(fraction, None, longest=longest, summary=summary)

    def parts(self, document: Document) -> tuple[Document | None, Document | None]:
        """The part of a document to train on, and the part to validate on; None for no part."""
        content = document.text.encode()
        number = text_hash(content)
        if number in self.ends or (len(content) > self.longest and document.messages is None):
            return split_document(document, self.fraction)
        is_whole = number < self.fraction * 2**64 if self.whole is None else number in self.whole
        return (None, document) if is_whole else (document, None)

    def side(self, documents: Iterable[Document], side: int) -> Iterator[Document]:
        """Yield the parts of documents to train on (side `TRAIN`) or to validate on (side `VALIDATION`)."""
        parts = (self.parts(document)[side] for document in documents)
        return (part for part in parts if part is not None)


def _are_long(sizes: NDArray[Any], fraction: float) -> NDArray[np.bool_]:
    """(texts,) whether a text is among the largest texts, which `Split.of_all` removes first."""
    order = np.argsort(sizes, kind="stable")  # the k-th entries below are of the k smallest texts
    total, squares = np.cumsum(sizes[order]), np.cumsum(sizes[order] ** 2)
    are_enough = (sizes[order] <= fraction * total) & (ENOUGH * squares <= fraction * total**2)
    is_long = np.ones(len(sizes), dtype=bool)
    is_long[order[: 1 + np.flatnonzero(are_enough).max(initial=-1)]] = False
    return is_long


def _chosen(sizes: NDArray[Any], is_cut: NDArray[np.bool_], fraction: float) -> NDArray[np.bool_]:
    """(texts,) whether a text is set aside whole; texts that are cut are not, and some text is left to train on."""
    is_chosen = np.zeros(len(sizes), dtype=bool)
    wanted = room = fraction * sizes[~is_cut].sum()
    for text in np.flatnonzero(~is_cut):
        if sizes[text] <= room:
            is_chosen[text] = True
            room -= sizes[text]
    is_left = ~is_cut & ~is_chosen
    if room >= 0.9 * wanted and is_left.sum() > 1:
        shortest = np.argmin(np.where(is_left, sizes, np.inf))
        is_chosen[shortest] = not is_cut.any() or sizes[shortest] <= fraction * sizes.sum()
    return is_chosen


def _summary(census: Census, num_cut: int, num_whole: int, fraction: float) -> str:
    number = len(census.sizes)
    if num_cut == 0:
        return f"{num_whole:,} of {plural(number, 'document')}"
    name = "".join(letter if letter.isprintable() else "?" for letter in census.longest[2])
    cut = shorten(name) if num_cut == 1 else f"{num_cut:,} documents"
    others = "" if num_cut == number else f" and {num_whole:,} of {plural(number - num_cut, 'other document')}"
    return f"the last {100 * fraction:g} % of {cut}{others}"


def with_summary(train: Description, validation: Description, summary: str, num_documents: int) -> Description:
    """The description of a validation text, with its summary and its number of cut documents.

    Args:
        train, validation: descriptions of the packed texts.
        summary: the summary of the split.
        num_documents: number of documents before the split.
    """
    summary += f", {decimal(validation.num_bytes)} of {decimal(train.num_bytes + validation.num_bytes)}"
    num_cut = train.num_documents + validation.num_documents - num_documents
    return replace(validation, summary=summary, num_cut=num_cut)


def split_document(document: Document, fraction: float) -> tuple[Document, Document]:
    """Cut a document in two, about where the last `fraction` begins: after a line, a word or else a character.

    Args:
        document: a text of at least two characters.
        fraction: share of its UTF-8 bytes in the second part.
    """
    text, content = document.text, document.text.encode()
    place = len(content[: int(len(content) * (1 - fraction))].decode("utf-8", "ignore"))
    place = min(max(place, 1), len(text) - 1)
    wanted = len(text) - place
    earliest = max(0, place - wanted)
    cut = (
        text.find("\n", place - 1, place + wanted // 2) + 1
        or text.rfind("\n", earliest, place) + 1
        or text.rfind(" ", earliest, place) + 1
        or place
    )
    return Document(f"{document.name} (first part)", text[:cut]), Document(f"{document.name} (last part)", text[cut:])
