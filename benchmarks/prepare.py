"""`multilin prepare` on generated text: speed of one and of several processes, and memory as the text grows.

The text is paragraphs of a source in any order, with made-up words between them, as new words come up in any real text
however long. The peer is `encode_batch_fast` of tokenizers on one core. The limit is as many programs that know nothing
of each other, each preparing its own copy: what several cores of this machine give.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import _results
from benchmarks._memory import resident_bytes
from benchmarks.tokenize import DEFAULT_SOURCE
from multilin.data.corpora import read_documents
from multilin.data.settings import ShardSettings
from multilin.data.sharding import prepare_shards
from multilin.data.tokenizers import load_tokenizer, train_tokenizer

BY_NAME_ONLY = "it writes gigabytes"
PEER_BYTES = 20_000_000


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks prepare", description=__doc__)
    parser.add_argument("--source", default=DEFAULT_SOURCE, help="see `read_documents`; here %(default)s if not given")
    parser.add_argument("--megabytes", type=int, nargs="+", default=[500], help="of generated text, for each size")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--folder", type=Path, help="where text is generated, and kept; a temporary folder by default")
    arguments = _results.parse(parser, argv)
    source = arguments.source
    rows: list[dict[str, Any]] = []
    print(f"{'':44}{'seconds':>9}{'MB/s':>8}{'MB per CPU s':>14}{'peak MB':>9}{'largest process':>17}")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder, kept = Path(name), arguments.folder or Path(name)
        tokenizer = str(kept / "tokenizer")
        if not Path(tokenizer).exists():
            texts = (document.text for document in read_documents(source))
            train_tokenizer(texts, "bpe", 8192).save_pretrained(tokenizer)
        for size in arguments.megabytes:
            text = kept / f"{size}.jsonl"
            if not text.exists():
                generate(source, text, size * 10**6)
            peer = [(text, tokenizer, None, 1)]
            rows.append(_measure("peer: encode_batch_fast, one core", PEER_BYTES, _side_by_side, peer))
            works = [(text, tokenizer, folder / f"limit{number}", 1) for number in range(max(arguments.workers))]
            rows.append(_measure(f"limit: {len(works)} programs", len(works) * size * 10**6, _side_by_side, works))
            for workers in arguments.workers:
                output = folder / f"{size}-{workers}"
                title = f"prepare, {size:,} MB, --workers {workers}"
                rows.append(_measure(title, size * 10**6, _side_by_side, [(text, tokenizer, output, workers)]))
    _results.save("prepare", arguments, rows)


def generate(source: str, path: Path, num_bytes: int) -> None:
    """Lines of JSON with about so many bytes of text."""
    draw = random.Random(0)
    paragraphs = [
        paragraph
        for document in read_documents(source)
        for paragraph in document.text.split("\n\n")
        if paragraph.strip()
    ]
    left = num_bytes
    with path.open("w", encoding="utf-8") as stream:
        while left > 0:
            parts = []
            for paragraph in draw.choices(paragraphs, k=8):
                parts += [paragraph, " ".join(f"{draw.getrandbits(40):x}" for _ in range(len(paragraph) // 500 + 1))]
            text = "\n\n".join(parts)
            left -= len(text.encode())
            stream.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")


def _measure(title: str, num_bytes: int, work: Callable[..., None], *arguments: Any) -> dict[str, Any]:
    with _Watch() as watch:
        begin, cpu_begin = time.perf_counter(), _cpu_seconds()
        work(*arguments)
        seconds, cpu_seconds = time.perf_counter() - begin, _cpu_seconds() - cpu_begin
    rate = num_bytes / 1e6 / seconds
    per_cpu = num_bytes / 1e6 / cpu_seconds
    held = f"{watch.total / 1e6:9.0f}{watch.largest / 1e6:17.0f}"
    print(f"{title:44}{seconds:9.1f}{rate:8.2f}{per_cpu:14.2f}{held}", flush=True)
    return {"name": title, "seconds": seconds, "megabytes_per_second": rate, "megabytes_per_cpu_second": per_cpu,
            "peak_bytes": watch.total, "largest_process_bytes": watch.largest}  # fmt: skip


def _cpu_seconds() -> float:
    """CPU time of all processes that this one started and that have ended, and of those that they started."""
    import resource

    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class _Watch:
    """The most memory that the processes started by this one held, together and one of them."""

    def __enter__(self) -> "_Watch":
        self.total = self.largest = 0
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ends.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ends.wait(0.25):
            held = []
            for pid in _descendants(os.getpid()):
                with contextlib.suppress(OSError, StopIteration):  # it has ended
                    held.append(resident_bytes(pid))
            self.total, self.largest = max(self.total, sum(held)), max(self.largest, *held, 0)


def _descendants(pid: int) -> Iterator[int]:
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in children.read_text().split():
                yield int(child)
                yield from _descendants(int(child))


def _side_by_side(works: list[tuple[Any, ...]]) -> None:
    """Each preparation in a program of its own."""
    processes = [multiprocessing.get_context("spawn").Process(target=_prepare, args=work) for work in works]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0


def _prepare(text: Path, tokenizer: str, output: Path | None, workers: int) -> None:
    if output is None:
        _peer(text, tokenizer)
        return
    prepare_shards(ShardSettings(str(text), str(output), tokenizer=tokenizer), workers=workers)


def _peer(text: Path, tokenizer: str) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    backend, left, batch = load_tokenizer(tokenizer).backend_tokenizer, PEER_BYTES, []
    for document in read_documents(str(text)):
        batch.append(document.text)
        left -= len(document.text.encode())
        if len(batch) == 256 or left <= 0:
            for encoding in backend.encode_batch_fast(batch):
                encoding.ids  # noqa: B018
            batch = []
        if left <= 0:
            break
