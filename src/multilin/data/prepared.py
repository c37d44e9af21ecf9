"""Prepared text in shards: the manifest, the shards as one text to train on, and mixtures of prepared texts.

    manifest.json   lists files, with checksums          train/00000-000/ ...   packed texts, see `PackedText`
    tokenizer/      the tokenizer                        validation/            one packed text

Prepared text is in a folder or at any address of fsspec; files at an address are cached here when they are first read.
"""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import MaxLen, MinLen
from numpy.typing import NDArray
from pydantic import StringConstraints
from torch import Tensor
from torch.utils.data import ConcatDataset
from transformers import PreTrainedTokenizerFast

from multilin.data.packed_text import Blocks, Description, PackedText, concatenate, merged
from multilin.data.progress import Progress, no_progress
from multilin.data.settings import MANIFEST
from multilin.data.store import Store, cache_root, check_files, make_once
from multilin.data.tokenizers import load_tokenizer, tokenizer_hash
from multilin.errors import InputError, as_input_error, shown
from multilin.settings import load_settings
from multilin.settings.bounds import Section, Size

FORMAT = 1
_Sum = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
_FileName = Annotated[str, StringConstraints(pattern=r"^\w[\w.-]*$")]


@dataclass(frozen=True)
class Folder:
    """A folder of prepared text; the folder's name is relative to the manifest."""

    name: Annotated[str, StringConstraints(pattern=r"^(unfinished/)?[a-z]+(/[0-9]+-[0-9]+)?$")]
    files: Annotated[dict[_FileName, _Sum], MaxLen(100)]  # SHA-256 of each file, by name
    description: Description | None  # the content of packed.json; None for the tokenizer

    def describe(self) -> Description:
        """The description of a packed text."""
        if self.description is None:
            raise InputError(f"{self.name}: the manifest does not describe the text; prepare the text again")
        return self.description


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json, the last file that a preparation writes."""

    format: Size
    settings: Section  # all settings that determined the content, and the source's hash
    num_documents: Size  # documents of training and validation text together
    num_tokens: Size
    num_bytes: Size  # UTF-8 bytes of the text
    tokenizer_hash: _Sum
    tokenizer: Folder
    validation: Folder
    train: Annotated[list[Folder], MinLen(1), MaxLen(10**7)]

    def to_json(self) -> bytes:
        """The content of manifest.json: the fields, and then the SHA-256 of these fields."""
        values = dataclasses.asdict(self)
        return json.dumps(values | {"sha256": _sum(values)}, indent=1).encode()

    @classmethod
    def parse(cls, content: bytes, where: str) -> "Manifest":
        """The manifest in a file.

        Raises:
            InputError: the manifest is damaged, or has a format that this version does not know.
        """
        try:
            values = json.loads(content)
            expected = values.pop("sha256")
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
            raise InputError(
                f"{where} is not a manifest of prepared text; prepare the text again, or give files of text by a "
                "glob such as 'texts/*.txt'"
            ) from None
        if expected != _sum(values):
            raise InputError(f"{where} is damaged: its checksum does not match its content; prepare the text again")
        if values.get("format") != FORMAT:
            raise InputError(f"{where} has format {shown(values.get('format'))}, but only {FORMAT} is known")
        return load_settings(cls, values, where)


def _sum(values: Any) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


ConcatBlocks = ConcatDataset[dict[str, Tensor]]


class ShardBlocks(torch.utils.data.Dataset[dict[str, Tensor]]):
    """The blocks of one shard, see `Blocks`; the shard is downloaded when its first block is read."""

    def __init__(self, text: "ShardedText", number: int, block_size: int) -> None:
        self._text, self._number, self._block_size = text, number, block_size
        if text.description.is_chat:  # how many conversations fit into a block depends on their lengths
            self._length = len(self._blocks)
        else:
            self._length = (text.folders[number].describe().num_tokens - 1) // (block_size - 1)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self._blocks[index]

    @functools.cached_property
    def _blocks(self) -> Blocks:
        return self._text.shard(self._number).blocks(self._block_size)


class ShardedText:
    """The shards of a prepared text as one text, with the methods of a packed text.

    Attributes:
        description: the sizes of all shards together.
        num_tokens, num_bytes: sums over all shards.
    """

    def __init__(self, store: Store, folders: Sequence[Folder], cache: Path) -> None:
        self.store, self.folders, self.cache = store, folders, cache
        self.description = merged([folder.describe() for folder in folders])
        self.num_tokens, self.num_bytes = self.description.num_tokens, self.description.num_bytes

    def shard(self, number: int) -> PackedText:
        """The shard with this index, downloaded if it is not on this machine."""
        folder = self.folders[number]
        return PackedText.open(self.store.fetch(folder.name, folder.files, self.cache))

    @property
    def shards(self) -> Iterator[PackedText]:
        """All shards, one at a time."""
        return map(self.shard, range(len(self.folders)))

    def blocks(self, block_size: int) -> ConcatBlocks:
        """The blocks of all shards, without the tokens after the last whole block of each shard.

        Raises:
            InputError: no shard holds a whole block.
        """
        blocks: ConcatBlocks = ConcatDataset([ShardBlocks(self, n, block_size) for n in range(len(self.folders))])
        if len(blocks) == 0:
            raise InputError(f"{self.store.field}: no shard of {self.store.address} has {block_size} tokens")
        return blocks

    def token_counts(self) -> NDArray[np.int64]:
        """(vocab_size,) how often each token occurs; reads all shards."""
        return sum((shard.token_counts() for shard in self.shards), np.zeros(self.description.vocab_size, np.int64))

    def describe(self) -> dict[str, Any]:
        """The description as plain data, for a run's data.json."""
        return dataclasses.asdict(self.description)


class MixedBlocks(ConcatDataset[dict[str, Tensor]]):
    """The blocks of all texts of a mixture; training reads a text's blocks in proportion to its weight."""

    def __init__(self, parts: Sequence[ConcatBlocks], weights: Sequence[float]) -> None:
        super().__init__(parts)
        self.parts, self.weights = parts, weights


class MixedText:
    """Several texts of one tokenizer, whose blocks a training run reads in proportion to weights.

    A mixture has the same attributes as `ShardedText`.
    """

    def __init__(self, texts: Sequence[ShardedText], weights: Sequence[float]) -> None:
        self.texts, self.weights = texts, weights
        self.description = merged([text.description for text in texts])
        self.num_tokens, self.num_bytes = self.description.num_tokens, self.description.num_bytes

    @property
    def shards(self) -> Iterator[PackedText]:
        """The shards of all texts."""
        return itertools.chain.from_iterable(text.shards for text in self.texts)

    def blocks(self, block_size: int) -> MixedBlocks:
        """The blocks of all texts.

        Raises:
            InputError: a text holds no whole block.
        """
        return MixedBlocks([text.blocks(block_size) for text in self.texts], self.weights)

    def token_counts(self) -> NDArray[np.int64]:
        """(vocab_size,) how often each token would occur in num_tokens tokens of the mixture."""
        frequencies = [text.token_counts() / text.num_tokens for text in self.texts]
        return np.rint(self.num_tokens * np.average(frequencies, axis=0, weights=self.weights)).astype(np.int64)

    def describe(self) -> dict[str, Any]:
        """The descriptions as plain data, for a run's data.json."""
        return {"mix": [text.describe() for text in self.texts], "weights": list(self.weights)}


TrainText = PackedText | ShardedText | MixedText


@dataclass(frozen=True)
class PreparedText:
    """A tokenizer, the text to train on, and the packed text to validate on; `identity` is a hash of all three."""

    tokenizer: PreTrainedTokenizerFast
    train: TrainText
    validation: PackedText
    identity: str


def open_prepared(field: str, address: str, progress: Progress = no_progress) -> PreparedText:
    """Open prepared text. New or changed files on this machine are first compared with their checksums.

    Raises:
        InputError: there is no manifest, or a file is damaged or missing; the message begins with the setting `field`.
    """
    store, cache = Store(field, address), cache_root() / "shards"
    manifest, content = read_manifest(store)
    if store.local is not None and os.environ.get("LOCAL_RANK") in (None, "", "0"):
        _check_once(store.local, manifest, content, lambda: check_shards(store, manifest, progress))
    tokenizer = load_tokenizer(str(store.fetch(manifest.tokenizer.name, manifest.tokenizer.files, cache)))
    if tokenizer_hash(tokenizer) != manifest.tokenizer_hash:
        raise InputError(f"{field}: the text in {shown(address)} was not packed with the tokenizer there")
    validation = PackedText.open(store.fetch(manifest.validation.name, manifest.validation.files, cache))
    identity = hashlib.sha256(content).hexdigest()[:32]
    return PreparedText(tokenizer, ShardedText(store, manifest.train, cache), validation, identity)


def read_manifest(store: Store) -> tuple[Manifest, bytes]:
    """The manifest of prepared text, and the content of its file.

    Raises:
        InputError: there is no manifest, or the manifest is damaged or cannot be read.
    """
    subject = f"{store.field}: {shown(store.address)}"
    with as_input_error(lambda reason: f"{subject} cannot be read ({reason})"):
        content = store.read(MANIFEST)
    if content is None:
        raise InputError(
            f"{subject} holds no {MANIFEST}, which `multilin prepare --output {store.address}` writes last"
        )
    return Manifest.parse(content, f"{store.field}: {store.address}/{MANIFEST}"), content


def _check_once(folder: Path, manifest: Manifest, content: bytes, check: Callable[[], None]) -> None:
    """Check a folder, unless its files have the same sizes and times as in an earlier check."""
    parts = [manifest.tokenizer, manifest.validation, *manifest.train]
    paths = [folder.resolve() / part.name / file for part in parts for file in part.files]
    files = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths if path.exists()]
    mark = cache_root() / "checked" / hashlib.sha256(content + repr(files).encode()).hexdigest()
    with contextlib.suppress(OSError):  # without a cache the folder is checked each time
        if mark.exists():
            return
    check()
    with contextlib.suppress(OSError):
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()


def check_shards(store: Store, manifest: Manifest, progress: Progress) -> None:
    """Compare all files of folders on this machine with their checksums; other files are compared when copied.

    Raises:
        InputError: a file is missing or damaged.
    """
    if store.local is None:
        return
    folders = [manifest.tokenizer, manifest.validation, *manifest.train]
    for number, folder in enumerate(folders):
        check_files(store.field, store.local / folder.name, folder.files)
        progress("checking the text", number + 1, len(folders))


def open_mixture(weights: Mapping[str, float], progress: Progress = no_progress) -> PreparedText:
    """Open a mixture of prepared texts and of their validation texts. `weights` maps each address to a weight.

    Raises:
        InputError: see `open_prepared`; the texts have different tokenizers; texts and conversations are mixed; or the
            cache cannot be written.
    """
    texts = {address: open_prepared("data.mix", address, progress) for address in weights}
    (first_name, first), *others = texts.items()
    for name, other in others:
        for field, meaning in (
            ("tokenizer_hash", "have the same tokenizer"),
            ("is_chat", "be texts, or both be chats"),
        ):
            if getattr(other.validation.description, field) != getattr(first.validation.description, field):
                raise InputError(f"data.mix: {shown(first_name)} and {shown(name)} must both {meaning}")
    identity = hashlib.sha256(repr([(text.identity, weights[name]) for name, text in texts.items()]).encode())
    folder = cache_root() / "mixtures" / identity.hexdigest()[:32]
    make_once(folder, lambda unfinished: concatenate([text.validation for text in texts.values()], unfinished))
    shards = [text.train for text in texts.values() if isinstance(text.train, ShardedText)]
    train = MixedText(shards, list(weights.values()))
    return PreparedText(first.tokenizer, train, PackedText.open(folder), folder.name)
