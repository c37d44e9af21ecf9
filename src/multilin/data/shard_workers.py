"""The processes that pack the parts of a source into shards, each of which can stop after any shard and go on."""

import contextlib
import itertools
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from multilin.data.encoding import make_encoder
from multilin.data.files import Document
from multilin.data.manifest import Folder
from multilin.data.packed_text import DESCRIPTION, Description
from multilin.data.packing import pack_into
from multilin.data.parts import Part, PartReader
from multilin.data.progress import Progress
from multilin.data.settings import ShardSettings
from multilin.data.split import Split
from multilin.data.store import Store
from multilin.data.tokenizers import load_tokenizer
from multilin.files import checksum
from multilin.settings import load_settings

SHARD_BYTES = 2**26
"""UTF-8 bytes of text after which a shard ends."""
UNFINISHED = "unfinished"
"""The folder of unfinished work, which is deleted at the end."""
_SECONDS_BETWEEN_REPORTS = 0.5


@dataclass
class PartRecord:
    """How far a part is prepared: the content of its file in `unfinished`."""

    position: dict[str, Any] = field(default_factory=dict)
    is_done: bool = False
    num_rounds: int = 0
    train: list[Folder] = field(default_factory=list)
    validation: list[Folder] = field(default_factory=list)
    num_cut: int = 0  # documents with parts on both sides

    @classmethod
    def read(cls, store: Store, number: int) -> "PartRecord":
        """The record of a part; an empty record if there is none, or only a part of its file arrived."""
        content = store.read(f"{UNFINISHED}/{number:05}.json")
        with contextlib.suppress(ValueError, TypeError):
            return load_settings(cls, json.loads(content or b""))
        return cls()

    @classmethod
    def read_all(cls, store: Store, count: int) -> "list[PartRecord]":
        """The records of the first `count` parts."""
        names = store.names(UNFINISHED)
        return [cls.read(store, number) if f"{number:05}.json" in names else cls() for number in range(count)]

    def write(self, store: Store, number: int) -> None:
        """Write the record, when all shards that it names are complete."""
        store.write(f"{UNFINISHED}/{number:05}.json", json.dumps(asdict(self)).encode())

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of the text in all shards."""
        return sum(folder.describe().num_bytes for folder in [*self.train, *self.validation])


@dataclass(frozen=True)
class Job:
    """What every process needs to prepare any part."""

    settings: ShardSettings
    parts: list[Part]
    split: Split
    tokenizer: str  # folder on this machine

    def reader(self, number: int, position: dict[str, Any] | None = None) -> PartReader:
        """A reader of one of the parts."""
        plan = self.settings
        return PartReader(plan.source, self.parts[number], plan.text_field, plan.encoding_errors, position or {})


def describe_folder(name: str, folder: Path) -> Folder:
    """The entry in a manifest of a folder, under the given name."""
    files = {file.name: checksum(file) for file in sorted(folder.iterdir())}
    description = folder / DESCRIPTION
    return Folder(name, files, Description(**json.loads(description.read_text())) if description.exists() else None)


class Packer:
    """Packs parts, one after the other, with an encoder that remembers words."""

    def __init__(self, job: Job, report: Callable[[int], None]) -> None:
        self._job, self._report = job, report
        self._store = Store("--output", job.settings.output)
        self._tokenizer = load_tokenizer(job.tokenizer)
        self._encoder = make_encoder(self._tokenizer)

    def pack(self, number: int) -> PartRecord:
        """Pack the rest of a part."""
        record = PartRecord.read(self._store, number)
        reader = self._job.reader(number, record.position)
        documents = iter(reader)
        while not record.is_done:
            held_out: list[Document] = []
            name = f"{number:05}-{record.num_rounds:03}"
            self._write(f"train/{name}", self._shard(documents, held_out, record), record.train)
            self._write(f"{UNFINISHED}/validation/{name}", iter(held_out), record.validation)
            record.position, record.num_rounds = reader.position(), record.num_rounds + 1
            record.write(self._store, number)
        return record

    def _shard(self, documents: Iterator[Document], held_out: list[Document], record: PartRecord) -> Iterator[Document]:
        """The documents of one shard, or their beginnings; what is to validate on is set aside."""
        size = 0
        for document in documents:
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
            entries.append(describe_folder(name, folder))


def pack_parts(store: Store, job: Job, workers: int, progress: Progress) -> list[PartRecord]:
    """Pack all parts that are not complete, and return the records of all parts."""
    records = PartRecord.read_all(store, len(job.parts))
    missing = [number for number, record in enumerate(records) if not record.is_done]
    done = sum(record.num_bytes for record in records)
    if (workers := min(workers, len(missing))) <= 1:

        def report(num_bytes: int) -> None:
            nonlocal done
            progress("packing", done := done + num_bytes)

        with _serial_tokenizers():
            packer = Packer(job, report)
            for number in missing:
                records[number] = packer.pack(number)
        return records
    for number, record in _in_processes(job, missing, workers, lambda count: progress("packing", done + count)):
        records[number] = record
    return records


@contextlib.contextmanager
def _serial_tokenizers() -> Iterator[None]:
    """Have tokenizers use one core."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        del os.environ["TOKENIZERS_PARALLELISM"]
        if before is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def _in_processes(
    job: Job, numbers: list[int], workers: int, report: Callable[[int], None]
) -> Iterator[tuple[int, PartRecord]]:
    """The records of parts as they are packed, by processes that end with this one, however it ends."""
    # A process forked from one with threads may hang; one that imports everything anew takes seconds to begin.
    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    context.set_forkserver_preload([__name__])
    counter, others = context.Value("q", 0), set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(workers, context, _start_worker, (job, counter))
    is_done = False
    try:
        number_of = {pool.submit(_pack, number): number for number in numbers}
        while number_of:
            finished, _ = wait(number_of, _SECONDS_BETWEEN_REPORTS, FIRST_COMPLETED)
            report(counter.value)
            for future in finished:
                yield number_of.pop(future), future.result()
        is_done = True
    except BrokenProcessPool:
        raise ChildProcessError(
            f"--workers: one of {workers} processes was ended from outside, for want of memory perhaps; the same "
            "command goes on where it stopped"
        ) from None
    finally:
        for process in set(multiprocessing.active_children()) - others if not is_done else ():
            process.terminate()
        pool.shutdown(cancel_futures=True)


_packer: Packer


def _start_worker(job: Job, counter: Any) -> None:
    global _packer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends the others
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
