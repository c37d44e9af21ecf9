"""Text of any size into shards of packed text, by several processes, so that a preparation may stop and go on.

A source is cut into parts. A process reads one part at a time and writes its shards, each of them complete or absent,
and after each a record of how far it came; a preparation that was ended goes on behind these records. The manifest is
written last. Which text is set aside for validation is decided first, see `multilin.data.split.Split`.
"""

import contextlib
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import PreTrainedTokenizerFast

from multilin.data.chat import CHAT_TEMPLATE
from multilin.data.corpora import report_left_out
from multilin.data.manifest import FORMAT, Folder, Manifest
from multilin.data.packed_text import PackedText, merged, write_description
from multilin.data.packing import concatenate
from multilin.data.parts import Part, PartReader, cut_source
from multilin.data.prepared import check_shards
from multilin.data.progress import Progress, no_progress
from multilin.data.settings import DEFAULT_KIND, MANIFEST, ShardSettings
from multilin.data.shard_workers import UNFINISHED, Job, PartRecord, describe_folder, pack_parts
from multilin.data.split import TRAIN, Census, Split, with_summary
from multilin.data.store import Store
from multilin.data.tokenizers import load_tokenizer, save_tokenizer, tokenizer_hash, train_tokenizer
from multilin.errors import InputError, prefixed, shown
from multilin.files import remove_partials
from multilin.files.lock import locked_folder
from multilin.settings import load_settings

TOKENIZER_BYTES = 10**8
"""UTF-8 bytes of text that a tokenizer is trained on, taken from the beginnings of all parts."""
SAMPLED_PARTS = 100
COUNTED_BYTES = 2**26
"""UTF-8 bytes of text from which on its beginning may decide what to validate on."""
_SETTINGS = f"{UNFINISHED}/settings.json"


def prepare_shards(plan: ShardSettings, *, workers: int = 1, progress: Progress = no_progress) -> Manifest:
    """Prepare text into a folder, or to an address of fsspec. Shards that an earlier call has finished are kept.

    Memory holds one document per process and a few hundred bytes for each shard, however long the text. With several
    workers, a program that calls this should do so below `if __name__ == "__main__":`.

    Args:
        plan: the source, the output and how text becomes tokens.
        workers: processes that pack.
        progress: called now and then with the bytes of text done.

    Raises:
        InputError: the source, the tokenizer or the output cannot be used, or the output holds another text.
        ChildProcessError: a process was ended from outside. Finished shards stay.
    """
    for name in ("kind", "vocab_size"):
        if plan.tokenizer is not None and (given := getattr(plan, name)) is not None:
            raise InputError(
                f"{name}: {given} given, but the tokenizer {shown(plan.tokenizer)} decides it; leave one out"
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
                job = Job(plan, parts, _choose_split(plan, parts, progress), "")
                entry = _tokenizer(store, job, deciding, tokenizer, progress)
                job = replace(job, tokenizer=str(store.fetch(entry.name, entry.files, Path(temporary))))
                records = pack_parts(store, job, workers, progress)
                manifest = _finish(store, job, deciding, entry, records, Path(temporary))
        store.remove(UNFINISHED)
        return manifest


@contextlib.contextmanager
def _clean(store: Store, num_parts: int) -> Iterator[None]:
    """Remove unfinished files of killed processes; after bad input, also all files if no shard is complete."""
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
    """The manifest of a complete preparation; None if the preparation begins or goes on.

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
        begun, given = f"another {name}", f"{name} {shown(deciding.get(name))} given"
        if name == "content":
            begun, given = "text files of other sizes or times", "they may hold another text"
        raise InputError(f"--output: {shown(store.address)} was begun with {begun}, and {given}; name a new folder")
    return manifest


def _choose_split(plan: ShardSettings, parts: list[Part], progress: Progress) -> Split:
    """What to validate on, from the whole text or, where that is long, from as much of its beginning as suffices.

    Raises:
        InputError: there is no text, or nothing of it can be set aside.
    """
    census, checked = Census(), COUNTED_BYTES
    readers = (PartReader(plan.source, part, plan.text_field, plan.encoding_errors, {}) for part in parts)
    for document in itertools.chain.from_iterable(readers):
        census.add(document)
        if census.num_bytes >= checked:
            if (split := Split.of_beginning(census, plan.validation_fraction)) is not None:
                return split
            checked += checked // 2
            progress("reading", census.num_bytes)
    if not census.num_bytes:
        raise InputError(f"SOURCE: {shown(plan.source)} is empty: a corpus needs some text")
    with prefixed(f"SOURCE: {shown(plan.source)}: "):
        return Split.of_all(census, plan.validation_fraction)


def _holds_files(folder: Path) -> bool:
    """True for visible files, but for a preparation that was killed before it wrote any."""
    return any(path.name != UNFINISHED or any(path.glob("[!.]*")) for path in folder.glob("[!.]*"))


def _read_json(store: Store, name: str) -> Any:
    """The content of a JSON file; None if there is none, or only a part of the file arrived."""
    try:
        return json.loads(store.read(name) or b"null")
    except ValueError:
        return None


def _tokenizer(
    store: Store, job: Job, deciding: dict[str, Any], loaded: PreTrainedTokenizerFast | None, progress: Progress
) -> Folder:
    """The folder of the tokenizer in the output, which is made first."""
    if (content := _read_json(store, f"{UNFINISHED}/tokenizer.json")) is not None:
        return load_settings(Folder, content)
    texts, is_chat = _sample(job, progress)
    tokenizer = loaded or train_tokenizer(texts, deciding["kind"], deciding["vocab_size"])
    if is_chat and tokenizer.chat_template is None:
        tokenizer.chat_template = CHAT_TEMPLATE
    store.write(_SETTINGS, json.dumps(deciding).encode())
    with store.new_folder("tokenizer") as folder:
        save_tokenizer(tokenizer, folder)
        entry = describe_folder("tokenizer", folder)
    store.write(f"{UNFINISHED}/tokenizer.json", json.dumps(asdict(entry)).encode())
    return entry


def _sample(job: Job, progress: Progress) -> tuple[Iterator[str], bool]:
    """Texts to train a tokenizer on, from parts all over the source, and whether they are conversations."""
    every = range(len(job.parts))
    for numbers in (every[:: -(-len(every) // SAMPLED_PARTS) or 1], every):  # all, if the sampled ones hold no text
        first = next(itertools.chain.from_iterable(map(job.reader, numbers)), None)
        if first is not None:
            break
    assert first is not None, "an empty text is refused before"

    def texts() -> Iterator[str]:
        total = 0
        for number in numbers:
            room = TOKENIZER_BYTES // len(numbers)
            for document in job.split.side(job.reader(number), TRAIN):
                yield document.text
                size = len(document.text.encode())
                progress("training the tokenizer", total := total + size)
                room -= size
                if room <= 0:
                    break

    return texts(), first.messages is not None


def _finish(
    store: Store, job: Job, deciding: dict[str, Any], tokenizer: Folder, records: list[PartRecord], temporary: Path
) -> Manifest:
    """Put the validation text together and write the manifest."""
    train = [folder for record in records for folder in record.train]
    pieces = [folder for record in records for folder in record.validation]
    report_left_out(
        job.settings.source, sum((Counter(record.position.get("left_out")) for record in records), Counter())
    )
    if len({folder.describe().is_chat for folder in [*train, *pieces]}) > 1:
        raise InputError(f"{shown(job.settings.source)}: holds texts and conversations; give them apart")
    texts = [PackedText.open(store.fetch(piece.name, piece.files, temporary)) for piece in pieces]
    with store.new_folder("validation") as folder:
        concatenate(texts, folder)
        trained, held_out = (merged([entry.describe() for entry in entries]) for entries in (train, pieces))
        whole = merged([trained, held_out])
        num_documents = whole.num_documents - sum(record.num_cut for record in records)
        write_description(folder, with_summary(trained, held_out, job.split.summary, num_documents))
        validation = describe_folder("validation", folder)
    manifest = Manifest(
        format=FORMAT, settings=deciding, num_documents=num_documents, num_tokens=whole.num_tokens,
        num_bytes=whole.num_bytes, tokenizer_hash=whole.tokenizer_hash, tokenizer=tokenizer, validation=validation,
        train=train,
    )  # fmt: skip
    store.write(MANIFEST, manifest.to_json())
    return manifest
