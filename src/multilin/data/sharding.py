"""Prepares text of any size as shards of packed text, in several processes; a stopped preparation can continue.

First, the text for validation is chosen, see `multilin.data.split.Split`. The source is cut into parts. A process reads
one part at a time and writes the part's shards, each complete or absent. After each shard the process writes a record
of its progress, from which a stopped preparation continues. The manifest is written last.
"""

import contextlib
import itertools
import json
import multiprocessing
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import PreTrainedTokenizerFast

from multilin.data.chat import CHAT_TEMPLATE
from multilin.data.corpora import Part, cut_source, read_part, report_left_out
from multilin.data.encoding import make_encoder
from multilin.data.files import Document
from multilin.data.packed_text import (
    DESCRIPTION,
    Description,
    PackedText,
    concatenate,
    merged,
    pack_into,
    write_description,
)
from multilin.data.prepared import FORMAT, Folder, Manifest, check_shards
from multilin.data.progress import Progress, no_progress
from multilin.data.settings import DEFAULT_KIND, MANIFEST, ShardSettings
from multilin.data.split import TRAIN, Census, Split, with_summary
from multilin.data.store import Store
from multilin.data.tokenizers import load_tokenizer, save_tokenizer, tokenizer_hash, train_tokenizer
from multilin.errors import InputError, prefixed, shown
from multilin.files import checksum, remove_partials
from multilin.files.lock import locked_folder
from multilin.settings import load_settings

SHARD_BYTES = 2**26
"""UTF-8 bytes of text after which a shard ends."""
TOKENIZER_BYTES = 10**8
"""UTF-8 bytes of text to train a tokenizer on, from the beginnings of SAMPLED_PARTS parts."""
SAMPLED_PARTS = 100
COUNTED_BYTES = 2**26
"""UTF-8 bytes of a text's beginning that must be read before the beginning may decide the split."""
UNFINISHED = "unfinished"
"""The folder of unfinished work, which is deleted at the end."""
_SETTINGS = f"{UNFINISHED}/settings.json"
_SECONDS_BETWEEN_REPORTS = 0.5


@dataclass
class PartRecord:
    """The progress of a part, which is the content of the part's file in `unfinished`."""

    num_documents: int = 0
    num_null: int = 0  # rows left out because their text is null
    is_done: bool = False
    num_rounds: int = 0
    train: list[Folder] = field(default_factory=list)
    validation: list[Folder] = field(default_factory=list)
    num_cut: int = 0  # documents of which training and validation text have a part each

    @classmethod
    def read(cls, store: Store, number: int) -> "PartRecord":
        """The record of a part; an empty record if the part's file is missing or incomplete."""
        with contextlib.suppress(InputError):  # the record of another version
            return load_settings(cls, _read_json(store, f"{UNFINISHED}/{number:05}.json") or {})
        return cls()

    @classmethod
    def read_all(cls, store: Store, count: int) -> "list[PartRecord]":
        """The records of the first `count` parts."""
        names = store.names(UNFINISHED)
        return [cls.read(store, number) if f"{number:05}.json" in names else cls() for number in range(count)]

    def write(self, store: Store, number: int) -> None:
        """Write the record; all shards named in the record must be complete."""
        store.write(f"{UNFINISHED}/{number:05}.json", json.dumps(asdict(self)).encode())


@dataclass(frozen=True)
class Job:
    """The data with which a process can prepare any part."""

    settings: ShardSettings
    parts: list[Part]
    split: Split
    is_chat: bool
    tokenizer: str = ""  # folder on this machine

    def documents(self, number: int, left_out: Counter[str]) -> Iterator[Document]:
        """The documents of one of the parts; see `read_part`."""
        plan = self.settings
        return read_part(plan.source, self.parts[number], plan.text_field, plan.encoding_errors, left_out)


def prepare_shards(plan: ShardSettings, *, workers: int = 1, progress: Progress = no_progress) -> Manifest:
    """Turn text into shards of tokens, in a folder or at an address of fsspec. Finished shards of earlier calls stay.

    Memory holds one document per process and a few hundred bytes per shard, for a text of any length. With several
    workers, call this function below `if __name__ == "__main__":`.

    Args:
        plan: the source, the output, and the settings of the tokenizer.
        workers: number of processes that pack text.
        progress: called repeatedly with the bytes of text done.

    Raises:
        InputError: the source, the tokenizer or the output cannot be used, or the output holds another text.
        ChildProcessError: a process was killed. Finished shards are kept.
    """
    for name in ("kind", "vocab_size"):
        if plan.tokenizer is not None and (given := getattr(plan, name)) is not None:
            raise InputError(
                f"{name}: {given} given, but the tokenizer {shown(plan.tokenizer)} decides it; leave one of the two out"
            )
    plan = replace(plan, kind=plan.kind or DEFAULT_KIND)
    parts, identity = cut_source(plan.source)
    tokenizer = None if plan.tokenizer is None else load_tokenizer(plan.tokenizer)
    deciding = {name: value for name, value in asdict(plan).items() if name not in ("output", "tokenizer")}
    deciding |= {"content": identity, "tokenizer": None if tokenizer is None else tokenizer_hash(tokenizer)}
    store = Store("--output", plan.output)
    store.check_writable()
    with contextlib.nullcontext() if store.local is None else locked_folder("--output", store.local):
        if (manifest := _finished(store, deciding)) is not None:
            check_shards(store, manifest, progress)
        else:
            with TemporaryDirectory() as temporary, _clean(store, len(parts)):
                job = _begin(plan, parts, progress)
                entry = _tokenizer(store, job, deciding, tokenizer, progress)
                job = replace(job, tokenizer=str(store.fetch(entry.name, entry.files, Path(temporary))))
                records = _pack_parts(store, job, workers, progress)
                manifest = _finish(store, job, deciding, entry, records, Path(temporary))
        store.remove(UNFINISHED)
        return manifest


@contextlib.contextmanager
def _clean(store: Store, num_parts: int) -> Iterator[None]:
    """Remove unfinished files of killed processes; after bad input, remove all files if no shard is complete."""
    for folder in ("", "train", UNFINISHED, f"{UNFINISHED}/validation"):
        if store.local is not None:
            remove_partials(store.local / folder)
    try:
        yield
    except InputError:
        if not any(record.num_rounds for record in PartRecord.read_all(store, num_parts)):
            for folder in ("tokenizer", "train", "validation", UNFINISHED):
                store.remove(folder)
        raise


def _finished(store: Store, deciding: dict[str, Any]) -> Manifest | None:
    """The manifest of a complete preparation; None if the preparation is new or not complete.

    Raises:
        InputError: the output holds another text, or files of another kind.
    """
    content = store.read(MANIFEST)
    manifest = None if content is None else Manifest.parse(content, f"--output: {store.address}/{MANIFEST}")
    before = manifest.settings if manifest is not None else _read_json(store, _SETTINGS)
    if before is None and store.local is not None and _holds_files(store.local):
        raise InputError(f"--output: {shown(store.address)} holds files already; name a new folder")
    deciding = json.loads(json.dumps(deciding))
    if before is not None and before != deciding:
        name = next(name for name in deciding | before if before.get(name) != deciding.get(name))
        begun, given = f"another {name}", f"but {name} {shown(deciding.get(name))} is given now"
        if name == "content":
            begun, given = "text files of other sizes or times", "so their text may have changed"
        raise InputError(f"--output: {shown(store.address)} was begun with {begun}, {given}; name a new folder")
    return manifest


def _holds_files(folder: Path) -> bool:
    """True if a folder holds visible files, other than a preparation that was killed before it wrote any."""
    return any(path.name != UNFINISHED or any(path.glob("[!.]*")) for path in folder.glob("[!.]*"))


def _read_json(store: Store, name: str) -> Any:
    """The content of a JSON file; None if it is missing or incomplete."""
    try:
        return json.loads(store.read(name) or b"null")
    except ValueError:
        return None


def _begin(plan: ShardSettings, parts: list[Part], progress: Progress) -> Job:
    """Choose the text to validate on. Only the beginning of a long text is read, as far as the choice needs it.

    Raises:
        InputError: there is no text, or no part of the text can be set aside.
    """
    census, checked = Census(), COUNTED_BYTES
    read = (read_part(plan.source, part, plan.text_field, plan.encoding_errors, Counter()) for part in parts)
    for document in itertools.chain.from_iterable(read):
        census.add(document)
        if census.num_bytes >= checked:
            if (split := Split.of_beginning(census, plan.validation_fraction)) is not None:
                return Job(plan, parts, split, census.is_chat)
            checked += checked // 2
            progress("reading", census.num_bytes)
    if not census.num_bytes:
        raise InputError(f"SOURCE: {shown(plan.source)} is empty: a corpus needs some text")
    with prefixed(f"SOURCE: {shown(plan.source)}: "):
        return Job(plan, parts, Split.of_all(census, plan.validation_fraction), census.is_chat)


def _tokenizer(
    store: Store, job: Job, deciding: dict[str, Any], loaded: PreTrainedTokenizerFast | None, progress: Progress
) -> Folder:
    """The folder of the tokenizer in the output; if there is no tokenizer, make it first."""
    if (content := _read_json(store, f"{UNFINISHED}/tokenizer.json")) is not None:
        return load_settings(Folder, content)
    tokenizer = loaded or train_tokenizer(_sample(job, progress), deciding["kind"], deciding["vocab_size"])
    if job.is_chat and tokenizer.chat_template is None:
        tokenizer.chat_template = CHAT_TEMPLATE
    store.write(_SETTINGS, json.dumps(deciding).encode())
    with store.new_folder("tokenizer") as folder:
        save_tokenizer(tokenizer, folder)
        entry = _describe_folder("tokenizer", folder)
    store.write(f"{UNFINISHED}/tokenizer.json", json.dumps(asdict(entry)).encode())
    return entry


def _sample(job: Job, progress: Progress) -> Iterator[str]:
    """Texts to train a tokenizer on, from parts all over the source."""
    numbers = range(0, len(job.parts), -(-len(job.parts) // SAMPLED_PARTS))
    total = 0
    for number in numbers:
        room = TOKENIZER_BYTES // len(numbers)
        for document in job.split.side(job.documents(number, Counter()), TRAIN):
            yield document.text
            size = len(document.text.encode())
            progress("training the tokenizer", total := total + size)
            room -= size
            if room <= 0:
                break


def _finish(
    store: Store, job: Job, deciding: dict[str, Any], tokenizer: Folder, records: list[PartRecord], temporary: Path
) -> Manifest:
    """Put the validation text together and write the manifest."""
    train = [folder for record in records for folder in record.train]
    pieces = [folder for record in records for folder in record.validation]
    report_left_out(job.settings.source, {"null": sum(record.num_null for record in records)})
    if len({folder.describe().is_chat for folder in [*train, *pieces]}) > 1:
        raise InputError(f"{shown(job.settings.source)}: holds texts and conversations; prepare them separately")
    texts = [PackedText.open(store.fetch(piece.name, piece.files, temporary)) for piece in pieces]
    with store.new_folder("validation") as folder:
        concatenate(texts, folder)
        trained, held_out = (merged([entry.describe() for entry in entries]) for entries in (train, pieces))
        whole = merged([trained, held_out])
        num_documents = whole.num_documents - sum(record.num_cut for record in records)
        write_description(folder, with_summary(trained, held_out, job.split.summary, num_documents))
        validation = _describe_folder("validation", folder)
    manifest = Manifest(
        format=FORMAT, settings=deciding, num_documents=num_documents, num_tokens=whole.num_tokens,
        num_bytes=whole.num_bytes, tokenizer_hash=whole.tokenizer_hash, tokenizer=tokenizer, validation=validation,
        train=train,
    )  # fmt: skip
    store.write(MANIFEST, manifest.to_json())
    return manifest


def _describe_folder(name: str, folder: Path) -> Folder:
    """The entry of a folder in a manifest, under the given name."""
    files = {file.name: checksum(file) for file in sorted(folder.iterdir())}
    description = folder / DESCRIPTION
    return Folder(name, files, Description(**json.loads(description.read_text())) if description.exists() else None)


class Packer:
    """Packs parts, one after the other, and reuses one encoder, which remembers words."""

    def __init__(self, job: Job, report: Callable[[int], None]) -> None:
        self._job, self._report = job, report
        self._store = Store("--output", job.settings.output)
        self._tokenizer = load_tokenizer(job.tokenizer)
        self._encoder = make_encoder(self._tokenizer)

    def pack(self, number: int) -> PartRecord:
        """Pack the documents of a part that are not packed yet."""
        record, left_out = PartRecord.read(self._store, number), Counter[str]()
        documents = itertools.islice(self._job.documents(number, left_out), record.num_documents, None)
        while not record.is_done:
            held_out: list[Document] = []
            name = f"{number:05}-{record.num_rounds:03}"
            self._write(f"train/{name}", self._shard(documents, held_out, record), record.train)
            self._write(f"{UNFINISHED}/validation/{name}", iter(held_out), record.validation)
            record.num_null, record.num_rounds = left_out["null"], record.num_rounds + 1
            record.write(self._store, number)
        return record

    def _shard(self, documents: Iterator[Document], held_out: list[Document], record: PartRecord) -> Iterator[Document]:
        """Yield the training parts of one shard's documents; the validation parts are added to `held_out`."""
        size = 0
        for document in documents:
            record.num_documents += 1
            size += len(document.text.encode())
            first, last = self._job.split.parts(document)
            record.num_cut += first is not None and last is not None
            if last is not None:
                held_out.append(last)
            if first is not None:
                yield first
            if size >= SHARD_BYTES:
                return
        record.is_done = True

    def _write(self, name: str, documents: Iterator[Document], entries: list[Folder]) -> None:
        if (first := next(documents, None)) is None:
            return
        reported = 0

        def report(num_bytes: int) -> None:
            nonlocal reported
            self._report(num_bytes - reported)
            reported = num_bytes

        with self._store.new_folder(name) as folder:
            pack_into(itertools.chain([first], documents), self._tokenizer, folder, report, self._encoder)
            entries.append(_describe_folder(name, folder))


def _pack_parts(store: Store, job: Job, workers: int, progress: Progress) -> list[PartRecord]:
    """Pack all parts that are not complete, and return the records of all parts."""
    records = PartRecord.read_all(store, len(job.parts))
    missing = [number for number, record in enumerate(records) if not record.is_done]
    done = sum(folder.describe().num_bytes for record in records for folder in [*record.train, *record.validation])

    def report(num_bytes: int) -> None:
        nonlocal done
        progress("packing", done := done + num_bytes)

    if (workers := min(workers, len(missing))) > 1:
        for number, record in _in_processes(job, missing, workers, report):
            records[number] = record
    elif missing:
        packer = Packer(job, report)
        for number in missing:
            records[number] = packer.pack(number)
    return records


def _in_processes(
    job: Job, numbers: list[int], workers: int, report: Callable[[int], None]
) -> Iterator[tuple[int, PartRecord]]:
    """Pack parts in several processes and yield the parts' records. The processes end when this process ends."""
    # A process forked from one with threads may hang; a new one takes seconds to import everything.
    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    context.set_forkserver_preload([__name__])
    counter, others = context.Value("q", 0), set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(workers, context, _start_worker, (job, counter))
    is_done, reported = False, 0
    try:
        number_of = {pool.submit(_pack, number): number for number in numbers}
        while number_of:
            finished, _ = wait(number_of, _SECONDS_BETWEEN_REPORTS, FIRST_COMPLETED)
            count = counter.value
            report(count - reported)
            reported = count
            for future in finished:
                yield number_of.pop(future), future.result()
        is_done = True
    except BrokenProcessPool:
        raise ChildProcessError(
            f"--workers: one of {workers} processes was killed, perhaps for lack of memory; the same "
            "command continues where it stopped"
        ) from None
    finally:
        for process in set(multiprocessing.active_children()) - others if not is_done else ():
            process.terminate()
        pool.shutdown(cancel_futures=True)


_packer: Packer


def _start_worker(job: Job, counter: Any) -> None:
    global _packer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process ends the others
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"

    def report(num_bytes: int) -> None:
        with counter.get_lock():
            counter.value += num_bytes

    _packer = Packer(job, report)


def _end_with(parent: Any) -> None:
    parent.join()
    os._exit(1)


def _pack(number: int) -> PartRecord:
    return _packer.pack(number)
