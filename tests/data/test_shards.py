"""Shards hold every document once, whoever was killed meanwhile, and are the same for any number of processes."""

import itertools
import json
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st

from multilin.data import corpora, sharding, store
from multilin.data.corpora import cut_source, read_part
from multilin.data.packed_text import PackedText
from multilin.data.prepare import prepare_text
from multilin.data.prepared import Manifest, ShardedText, _sum, open_mixture, open_prepared
from multilin.data.settings import MANIFEST, DataRecipe, ShardSettings, TokenizerRecipe
from multilin.data.sharding import prepare_shards
from multilin.errors import InputError
from multilin.files.lock import locked_folder
from multilin.training.recipe import load_recipe
from tests.processes import PYTHON, running

WORDS = ("the", "cat", "naïve", "sat", "你好", "under", "big", "green", "trees\n", "<|endoftext|>")


class Flaky(MemoryFileSystem):
    """A store whose every second call fails, as a bad network's."""

    protocol, store, pseudo_dirs = "flaky", {}, [""]
    calls = 0


def _fail_sometimes(name: str) -> Any:
    def call(self: Flaky, *arguments: Any, **options: Any) -> Any:
        Flaky.calls += 1
        if Flaky.calls % 2:
            raise ConnectionError("the network is away")
        return getattr(MemoryFileSystem, name)(self, *arguments, **options)

    return call


for _name in ("cat_file", "pipe_file", "get_file", "put_file", "rm"):
    setattr(Flaky, _name, _fail_sometimes(_name))


class ReadOnly(MemoryFileSystem):
    """A store that takes nothing."""

    protocol, store, pseudo_dirs = "readonly", {}, [""]

    def pipe_file(self, *arguments: Any, **options: Any) -> Any:
        raise PermissionError("AccessDenied")


class Remembering(MemoryFileSystem):
    """A store that keeps what it has listed, as those of clouds do."""

    protocol, store, pseudo_dirs = "remembering", {}, [""]
    listings: ClassVar[dict[str, Any]] = {}

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        return self.listings.setdefault(f"{path} {detail}", super().ls(path, detail, **options))

    def invalidate_cache(self, path: str | None = None) -> None:
        self.listings.clear()


fsspec.register_implementation("flaky", Flaky)
fsspec.register_implementation("readonly", ReadOnly)
fsspec.register_implementation("remembering", Remembering)


@pytest.fixture(autouse=True)
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "FIRST_WAIT", 0.0)
    monkeypatch.setattr(corpora, "PART_BYTES", 4000)
    yield
    for kind in (MemoryFileSystem, Flaky, ReadOnly, Remembering):
        kind.store.clear()


def make_texts(number: int = 200, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [f"{index}: " + " ".join(draw.choices(WORDS, k=draw.randrange(1, 60))) for index in range(number)]


def write_rows(path: Path, texts: Sequence[str | None]) -> Path:
    path.write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts))
    return path


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", make_texts())


def plan(source: Path | str, output: Path | str, **options: Any) -> ShardSettings:
    return ShardSettings(str(source), str(output), **{"kind": "byte", "validation_fraction": 0.1} | options)


def texts_of(address: Path | str) -> tuple[list[str], list[str]]:
    """Training and validation documents, as they stand there."""
    text = open_prepared("data.source", str(address))

    def decode(packed: PackedText) -> list[str]:
        return [text.tokenizer.decode(row[1:].tolist()) for row in np.split(packed.tokens, packed.document_starts[1:])]

    return [document for shard in text.train.shards for document in decode(shard)], decode(text.validation)


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def times_of(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_every_document_is_on_one_side_once_and_in_order(rows: Path, tmp_path: Path) -> None:
    manifest = prepare_shards(plan(rows, tmp_path / "out"))
    train, validation = texts_of(tmp_path / "out")
    assert sorted(train + validation) == sorted(make_texts())
    assert train == [text for text in make_texts() if text in set(train)]
    assert 0.03 < len(validation) / len(make_texts()) < 0.2
    assert len(manifest.train) > 5
    assert manifest.num_documents == len(make_texts())
    assert manifest.num_bytes == sum(len(text.encode()) for text in make_texts())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [MANIFEST, "tokenizer", "train", "validation"]


@settings(deadline=None, max_examples=60)
@given(
    texts=st.lists(st.text(min_size=1, max_size=30).filter(lambda text: text.isprintable()), min_size=1, max_size=20),
    size=st.integers(1, 200),
    ending=st.sampled_from(["\n", "\r\n", "\n\n"]),
)
def test_lines_are_cut_anywhere(tmp_path_factory: Any, texts: list[str], size: int, ending: str) -> None:
    path = tmp_path_factory.mktemp("cut") / "rows.jsonl"
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    path.write_bytes("\ufeff".encode() + ending.join(lines).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpora, "PART_BYTES", size)
        cut, _ = cut_source(str(path))
    found = [document.text for part in cut for document in read_part(str(path), part, "text", "strict", Counter())]
    assert found == texts


@settings(deadline=None, max_examples=60)
@given(sizes=st.lists(st.integers(0, 12), max_size=30), room=st.integers(1, 30))
def test_small_files_are_taken_together(tmp_path_factory: Any, sizes: list[int], room: int) -> None:
    folder = tmp_path_factory.mktemp("files")
    for number, size in enumerate([1, *sizes]):
        (folder / f"{number:03}.txt").write_text("a" * size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpora, "PART_BYTES", room)
        parts, _ = cut_source(str(folder))
    files = [entry for part in parts for entry in part.files]
    assert [name for name, _ in files] == sorted(path.name for path in folder.iterdir())
    totals = [[Path(path).stat().st_size for _, path in part.files] for part in parts]
    assert all(sum(total) <= room or len(total) == 1 for total in totals)
    assert all(sum(one) == room or sum(one) + other[0] > room for one, other in itertools.pairwise(totals))


def test_a_file_whose_name_is_not_utf8_is_read(tmp_path: Path) -> None:
    source = tmp_path / "latin"
    source.mkdir()
    for number, text in enumerate(make_texts(20)):
        Path(os.fsdecode(os.fsencode(source) + b"/caf\xe9%d.txt" % number)).write_text(text)
    text = prepare_text(DataRecipe(source=str(source)), TokenizerRecipe("byte"), cache_folder=tmp_path / "cache")
    assert text.train.num_documents + text.validation.num_documents == 20
    prepare_shards(plan(source, tmp_path / "out", validation_fraction=0.3))
    assert sorted(itertools.chain(*texts_of(tmp_path / "out"))) == sorted(make_texts(20))


def test_the_files_are_the_same_for_any_number_of_processes_and_calls(rows: Path, tmp_path: Path) -> None:
    prepare_shards(plan(rows, tmp_path / "one", kind="bpe", vocab_size=300))
    prepare_shards(plan(rows, tmp_path / "three", kind="bpe", vocab_size=300), workers=3)
    before, times = files_of(tmp_path / "one"), times_of(tmp_path / "one")
    assert before == files_of(tmp_path / "three")
    prepare_shards(plan(rows, tmp_path / "one", kind="bpe", vocab_size=300))
    assert files_of(tmp_path / "one") == before
    assert times_of(tmp_path / "one") == times


KILLED = """
import signal
import sys
from multilin.data import corpora
from multilin.data.settings import ShardSettings
from multilin.data.sharding import prepare_shards

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin without it
    corpora.PART_BYTES = 4000
    settings = ShardSettings(sys.argv[1], sys.argv[2], kind="byte", validation_fraction=0.1)
    prepare_shards(settings, workers=int(sys.argv[3]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "number"), [(1, signal.SIGINT), (2, signal.SIGKILL)])
def test_a_killed_preparation_goes_on_twice(tmp_path: Path, workers: int, number: int) -> None:
    source = write_rows(tmp_path / "rows.jsonl", make_texts(6000))
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    out = tmp_path / "out"
    finished: dict[Path, int] = {}
    for wanted in (5, 15):
        with running([*PYTHON, str(script), str(source), str(out), str(workers)]) as program:
            while len(records := list(out.glob("unfinished/0*.json"))) < wanted:
                assert program.poll() is None
                time.sleep(0.01)
            left = descendants(program.pid)
            program.send_signal(number)
            program.wait()
            while any(Path(f"/proc/{pid}/stat").exists() for pid in left):  # workers end with the program
                time.sleep(0.01)
        assert not (out / MANIFEST).exists()
        assert all(path.stat().st_mtime_ns == time_ns for path, time_ns in finished.items()), "a shard was packed again"
        finished = {path: path.stat().st_mtime_ns for path in (out / "train").glob("[!.]*/tokens.bin")}
        names = {record.stem for record in records}
        finished = {path: time_ns for path, time_ns in finished.items() if path.parent.name[:5] in names}
    prepare_shards(plan(source, out))
    prepare_shards(plan(source, tmp_path / "whole"))
    assert files_of(out) == files_of(tmp_path / "whole")


def test_a_worker_that_is_killed_ends_the_work_in_one_sentence(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharding, "_pack", _die)
    with pytest.raises(ChildProcessError, match="--workers: one of 2 processes was killed"):
        prepare_shards(plan(rows, tmp_path / "out"), workers=2)
    monkeypatch.undo()
    monkeypatch.setattr(corpora, "PART_BYTES", 4000)
    assert prepare_shards(plan(rows, tmp_path / "out")).num_documents == 200


def test_an_interruption_while_processes_begin_is_no_other_error(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sharding.ProcessPoolExecutor, "submit", interrupt)
    with pytest.raises(KeyboardInterrupt):
        prepare_shards(plan(rows, tmp_path / "out"), workers=2)


def descendants(pid: int) -> list[int]:
    listed = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    children = [int(child) for line in listed for child in line]
    return [*children, *(below for child in children for below in descendants(child))]


def _die(number: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_long_part_becomes_several_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "rows.csv"
    source.write_text("text\n" + "".join(f'"{text}"\n' for text in make_texts()))
    monkeypatch.setattr(sharding, "SHARD_BYTES", 3000)
    manifest = prepare_shards(plan(source, tmp_path / "out"))
    assert len(manifest.train) > 5
    train, validation = texts_of(tmp_path / "out")
    assert sorted(train + validation) == sorted(make_texts())


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_a_hub_dataset_is_streamed_and_resumed_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    folder = tmp_path / "dataset"
    folder.mkdir()
    for number in range(2):
        texts = make_texts()[number::2]
        if format == "jsonl":
            write_rows(folder / f"{number}.jsonl", texts)
        else:
            import pyarrow
            import pyarrow.parquet

            pyarrow.parquet.write_table(pyarrow.table({"text": texts}), folder / f"{number}.parquet", row_group_size=17)
    monkeypatch.setattr(sharding, "SHARD_BYTES", 2000)
    settings = plan(f"hub:{folder}", tmp_path / "out")
    with monkeypatch.context() as patch:
        for _ in range(3):
            _interrupt_after(patch, shards=2)
            with pytest.raises(KeyboardInterrupt):
                prepare_shards(settings)
    prepare_shards(settings)
    prepare_shards(plan(f"hub:{folder}", tmp_path / "whole"))
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")
    train, validation = texts_of(tmp_path / "out")
    assert sorted(train + validation) == sorted(make_texts())


def _interrupt_after(patch: pytest.MonkeyPatch, *, shards: int) -> None:
    write, left = sharding.PartRecord.write, [shards]
    patch.undo()

    def stop(record: Any, *arguments: Any) -> None:
        if left[0] == 0:
            raise KeyboardInterrupt
        left[0] -= 1
        write(record, *arguments)

    patch.setattr(sharding.PartRecord, "write", stop)


@pytest.mark.parametrize("address", ["memory://text", "file://{}/text", "flaky://text"])
def test_any_address_holds_the_same_text(rows: Path, tmp_path: Path, address: str) -> None:
    address = address.format(tmp_path)
    prepare_shards(plan(rows, tmp_path / "local"))
    prepare_shards(plan(rows, address))
    assert texts_of(address) == texts_of(tmp_path / "local")


def test_files_that_other_processes_wrote_are_listed_and_removed() -> None:
    """Else bad input in one part would delete the shards that workers have finished of others."""
    here = store.Store("--output", "remembering://text")
    here.write("unfinished/one.json", b"")
    assert here.names("unfinished") == {"one.json"}
    Remembering().pipe_file("remembering://text/unfinished/two.json", b"")
    assert here.names("unfinished") == {"one.json", "two.json"}
    Remembering().pipe_file("remembering://text/unfinished/three.json", b"")
    here.remove("unfinished")
    assert not Remembering.store


def test_a_refused_preparation_leaves_nothing_at_its_address(rows: Path) -> None:
    prepare_shards(plan(rows, "memory://text"))
    before = set(MemoryFileSystem.store)
    with pytest.raises(InputError, match="was begun with another validation_fraction"):
        prepare_shards(plan(rows, "memory://text", validation_fraction=0.2))
    assert set(MemoryFileSystem.store) == before


def test_far_shards_are_fetched_when_read_and_kept(rows: Path, tmp_path: Path) -> None:
    prepare_shards(plan(rows, "flaky://text"))
    train = open_prepared("data.source", "flaky://text").train
    cache = tmp_path / "cache" / "multilin" / "shards"
    num_before = len([path for path in cache.iterdir() if path.is_dir()])
    blocks = train.blocks(16)
    block = blocks[0]
    assert len([path for path in cache.iterdir() if path.is_dir()]) == num_before + 1
    Flaky.store.clear()
    assert blocks[0]["input_ids"].tolist() == block["input_ids"].tolist()
    with pytest.raises(InputError, match=r"data.source: flaky://text/train/\S+ cannot be read"):
        blocks[len(blocks) - 1]


def test_a_file_that_arrives_damaged_is_refused(rows: Path) -> None:
    prepare_shards(plan(rows, "memory://text"))
    name = next(name for name in MemoryFileSystem.store if name.endswith("train/00000-000/tokens.bin"))
    content = bytearray(MemoryFileSystem.store[name].getvalue())
    content[7] ^= 1
    fsspec.filesystem("memory").pipe_file(name, bytes(content))
    blocks = open_prepared("data.source", "memory://text").train.blocks(16)
    with pytest.raises(InputError, match="is damaged: its checksum differs from the manifest's"):
        blocks[0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (MANIFEST, "is damaged: its checksum does not match its content"),
        ("train/00001-000/tokens.bin", "is damaged: its checksum differs from the manifest's"),
        ("validation/index.safetensors", "is damaged: its checksum differs from the manifest's"),
        ("tokenizer/tokenizer.json", "is damaged: its checksum differs from the manifest's"),
    ],
)
def test_damage_is_found_before_training(rows: Path, tmp_path: Path, name: str, message: str) -> None:
    prepare_shards(plan(rows, tmp_path / "out"))
    path = tmp_path / "out" / name
    content = path.read_bytes()
    place = content.index(b'"num_') + 3 if name == MANIFEST else len(content) // 2
    path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    with pytest.raises(InputError, match=message):
        open_prepared("data.source", str(tmp_path / "out"))
    with pytest.raises(InputError, match=message):
        prepare_shards(plan(rows, tmp_path / "out"))
    path.unlink()
    with pytest.raises(InputError, match=r"holds no manifest|is missing|does not exist"):
        open_prepared("data.source", str(tmp_path / "out"))


def test_damage_behind_a_link_is_found_after_the_first_check(rows: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare_shards(plan(rows, out))
    (out / "train").rename(tmp_path / "elsewhere")
    (out / "train").symlink_to(tmp_path / "elsewhere")
    open_prepared("data.source", str(out))
    path = out / "train" / "00001-000" / "tokens.bin"
    path.write_bytes(bytes(len(path.read_bytes())))
    with pytest.raises(InputError, match="is damaged: its checksum differs from the manifest's"):
        open_prepared("data.source", str(out))


def test_a_cache_that_cannot_be_written_is_named_where_it_is_needed(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for output in ("memory://text", str(tmp_path / "out")):
        prepare_shards(plan(rows, output))
    monkeypatch.setenv("XDG_CACHE_HOME", str(rows / "no folder"))
    assert open_prepared("data.source", str(tmp_path / "out")).train.num_tokens > 0
    named = rf"the data cache {rows}/no folder/multilin/\w+ cannot be written \(Not a directory\)"
    with pytest.raises(InputError, match=named):
        open_prepared("data.source", "memory://text")
    with pytest.raises(InputError, match=named):
        open_mixture({str(tmp_path / "out"): 1.0})


def test_two_preparations_in_one_folder_are_refused(rows: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    manifest = prepare_shards(plan(rows, out))
    for change, name in (({"kind": "bpe", "vocab_size": 280}, "kind"), ({"validation_fraction": 0.2}, "validation_")):
        with pytest.raises(InputError, match=f"--output: .* was begun with another {name}"):
            prepare_shards(plan(rows, out, **change))
    other_version = replace(manifest, settings=manifest.settings | {"normalization": "NFC"})
    (out / MANIFEST).write_bytes(other_version.to_json())
    with pytest.raises(InputError, match="was begun with another normalization, but normalization None is given now"):
        prepare_shards(plan(rows, out))
    (out / MANIFEST).write_bytes(manifest.to_json())
    with rows.open("a") as stream:
        stream.write('{"text": "one more"}\n')
    with pytest.raises(
        InputError, match="text files of other sizes or times, so their text may have changed; name a new folder"
    ):
        prepare_shards(plan(rows, out))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("Dear")
    with pytest.raises(InputError, match="holds files already; name a new folder"):
        prepare_shards(plan(rows, tmp_path / "mine"))
    (tmp_path / "killed" / "unfinished").mkdir(parents=True)  # before it wrote a file
    prepare_shards(plan(rows, tmp_path / "killed"))
    with locked_folder("", tmp_path / "new"), pytest.raises(InputError, match=r"--output: .* is in use by process"):
        prepare_shards(plan(rows, tmp_path / "new"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "nowhere.jsonl"}, "'nowhere.jsonl' does not exist"),
        (
            {"output": "readonly://text"},
            r"--output: 'readonly://text' cannot be written \(PermissionError: Acc",
        ),
        ({"output": "nowhere://text"}, r"--output: 'nowhere://text' cannot be opened \(ValueError: Protocol not known"),
        ({"tokenizer": "./nowhere", "kind": None}, "tokenizer: './nowhere' does not exist"),
        ({"kind": "bpe", "vocab_size": 50_000}, "vocab_size: 50000 given, but the corpus supports"),
        ({"text_field": "body"}, "no field 'body'"),
    ],
)
def test_bad_settings_leave_nothing(rows: Path, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    options = {"source": str(rows), "output": str(tmp_path / "out")} | options
    with pytest.raises(InputError, match=message):
        prepare_shards(plan(**options))
    assert not (tmp_path / "out").exists()


def test_of_few_documents_the_ends_are_set_aside_as_a_run_does(tmp_path: Path) -> None:
    few = write_rows(tmp_path / "few.jsonl", [" ".join(text for text in make_texts(20, seed)) for seed in range(3)])
    for source in (few, write_rows(tmp_path / "same.jsonl", make_texts(1) * 2)):
        prepare_shards(plan(source, tmp_path / source.stem))
        train, validation = texts_of(tmp_path / source.stem)
        texts = [json.loads(line)["text"] for line in source.read_text().splitlines()]
        assert [first + last for first, last in zip(train, validation, strict=True)] == texts
        text = prepare_text(DataRecipe(source=str(source), validation_fraction=0.1), TokenizerRecipe("byte"))
        assert open_prepared("data.source", str(tmp_path / source.stem)).validation.tokens.tolist() == (
            text.validation.tokens.tolist()
        )


def test_a_single_conversation_is_refused(tmp_path: Path) -> None:
    (tmp_path / "chat.jsonl").write_text(json.dumps({"prompt": "How?", "completion": "So. " * 999}) + "\n")
    with pytest.raises(InputError, match=r"SOURCE: '.*chat\.jsonl': the only document is a conversation or a single"):
        prepare_shards(plan(tmp_path / "chat.jsonl", tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("workers", [1, 2])
def test_the_beginning_of_a_long_text_decides_what_is_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """Also where a long document comes late, and where the first one is longer than most of what is read."""
    monkeypatch.setattr(sharding, "COUNTED_BYTES", 3000)
    first, last = ("".join(f"{name} line {line}\n" for line in range(2000)) for name in ("first", "last"))
    for number, texts in enumerate(([*make_texts(), last], [first, *make_texts(3000), last])):
        source = write_rows(tmp_path / f"{number}.jsonl", texts)
        manifest = prepare_shards(plan(source, tmp_path / str(number)), workers=workers)
        train, validation = texts_of(tmp_path / str(number))
        assert manifest.num_documents == len(texts)
        assert sorted("".join(train + validation)) == sorted("".join(texts))
        for text in {first, last} & set(texts):
            (beginning,), (end,) = ([part for part in side if part in text] for side in (train, validation))
            assert beginning + end == text
            assert 0.05 < len(end) / len(text) < 0.11
        assert 0.03 < len("".join(validation)) / len("".join(texts)) < 0.2
        summary = r"10 % of the documents; of each document above \S+ (kB|bytes), its last 10 %, \S+ kB of \S+ kB"
        assert re.fullmatch(summary, manifest.validation.describe().summary)


def test_a_mixture_reads_prepared_texts_of_one_tokenizer(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 2)):
        prepare_shards(plan(write_rows(tmp_path / f"{name}.jsonl", make_texts(seed=seed)), tmp_path / name))
    prepare_shards(plan(tmp_path / "a.jsonl", tmp_path / "bpe", kind="bpe", vocab_size=280))
    a, b, bpe = (str(tmp_path / name) for name in ("a", "b", "bpe"))
    mixed = open_mixture({a: 2.0, b: 1.0})
    parts = [open_prepared("data.source", name) for name in (a, b)]
    assert mixed.validation.num_tokens == sum(part.validation.num_tokens for part in parts)
    starts = mixed.validation.document_starts
    assert (mixed.validation.tokens[starts] == mixed.validation.description.start_token_id).all()
    assert open_mixture({a: 2.0, b: 1.0}).identity == mixed.identity != open_mixture({a: 1.0, b: 1.0}).identity
    with pytest.raises(InputError, match="must both have the same tokenizer"):
        open_mixture({a: 1.0, bpe: 1.0})
    given = DataRecipe(mix={a: 1.0, str(tmp_path / "c"): 1.0})
    with pytest.raises(InputError, match=r"data.mix: '.*c' holds no manifest.json"):
        prepare_text(given, TokenizerRecipe())


def test_rows_of_null_are_counted_over_all_parts_and_interruptions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [row for text in make_texts() for row in (None, text)])
    write, calls = sharding.Packer._write, iter(range(7))

    def interrupted(*arguments: Any) -> None:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        write(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(sharding, "SHARD_BYTES", 1000)
        patch.setattr(sharding.Packer, "_write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare_shards(plan(rows, tmp_path / "out"))
    record = json.loads((tmp_path / "out" / "unfinished" / "00000.json").read_text())
    assert record["num_null"] > 0
    with pytest.warns(UserWarning, match="left out 200 rows whose text is null"):
        assert prepare_shards(plan(rows, tmp_path / "out")).num_documents == 200


def test_what_a_loaded_tokenizer_decides_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "tokenizer")
    for name, value in (("kind", "bpe"), ("vocab_size", 512)):
        with pytest.raises(InputError, match=f"{name}: {value} given, but the tokenizer .* decides it"):
            prepare_shards(ShardSettings("python-docs", str(tmp_path / "out"), tokenizer=path, **{name: value}))
        with pytest.raises(InputError, match=rf"tokenizer\.{name}: '?{value}'? given, but the loaded tokenizer "):
            load_recipe(None, {"tokenizer.path": path, f"tokenizer.{name}": value})
    assert load_recipe(None, {"tokenizer.path": None, "tokenizer.kind": "byte"}).tokenizer.kind == "byte"


def test_what_prepared_text_decides_is_refused(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", make_texts())
    prepare_shards(plan(tmp_path / "a.jsonl", tmp_path / "a"))
    source = str(tmp_path / "a")
    decided = {"tokenizer.vocab_size": 512, "data.text_field": "body", "data.validation_fraction": 0.5}
    for text in ({"data.source": source}, {"data.mix": {source: 1.0}}):
        for field, value in decided.items():
            with pytest.raises(InputError, match=f"{field}: '?{value}'? given, but the prepared text .* decides"):
                load_recipe("tscale", {**text, field: value})
        assert load_recipe("tscale", text).data.source == text.get("data.source", "python-docs")
    with pytest.raises(InputError, match=r"data.source: '.*' given, but data.mix is read instead; leave one"):
        load_recipe("tscale", {"data.source": source, "data.mix": {source: 1.0}})


def test_conversations_keep_their_answers(tmp_path: Path) -> None:
    source = tmp_path / "chat.jsonl"
    rows = [{"prompt": f"Say {number}", "completion": f"{number} it is"} for number in range(80)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepare_shards(plan(source, "memory://chat"))
    text = open_prepared("data.source", "memory://chat")
    assert isinstance(text.train, ShardedText)
    answers = [
        text.tokenizer.decode(block["labels"][block["labels"] >= 0].tolist())
        for block in map(text.train.blocks(40).__getitem__, range(len(text.train.blocks(40))))
    ]
    assert len(answers) == text.train.description.num_documents
    assert all("it is" in answer and "Say" not in answer for answer in answers)


def test_a_manifest_names_files_of_its_folder_only(rows: Path, tmp_path: Path) -> None:
    prepare_shards(plan(rows, tmp_path / "out"))
    path = tmp_path / "out" / MANIFEST
    manifest = Manifest.parse(path.read_bytes(), "here")
    for old, new in (("train/00000-000", "../../etc"), ("tokens.bin", "../x")):
        values = json.loads(path.read_bytes().decode().replace(old, new))
        del values["sha256"]
        content = json.dumps(values | {"sha256": _sum(values)}).encode()
        with pytest.raises(InputError, match=r"here\.\w+.*should match pattern"):
            Manifest.parse(content, "here")
    assert Manifest.parse(manifest.to_json(), "here") == manifest
