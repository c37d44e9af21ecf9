"""Speed and memory of tokenising and packing a text.

Every row is measured in its own process and shows its peak memory. Peers: transformers' tokenizer, one document at a
time, and tokenizers' call for batches. The limit is reading the text, which is part of every row.
"""

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import _results
from benchmarks._memory import own_peak_bytes
from multilin.data.corpora import Document, read_documents
from multilin.data.packed_text import pack
from multilin.data.tokenizers import load_tokenizer, train_tokenizer

DEFAULT_SOURCE = "books/train" if Path("books/train").exists() else "python-source"


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks tokenize", description=__doc__)
    parser.add_argument("--source", default=DEFAULT_SOURCE, help="as data.source of a recipe; default %(default)s")
    parser.add_argument("--vocab-sizes", type=int, nargs="+", default=[4096, 8192, 32000])
    arguments = _results.parse(parser, argv)
    source = arguments.source
    print(f"source {source}")
    print(f"{'':44}{'seconds':>9}{'MB/s':>8}{'tokens':>12}{'peak MB':>9}")
    rows = [_measure("limit: read the text only", _read, source)]
    with tempfile.TemporaryDirectory() as folder:
        for vocab_size in arguments.vocab_sizes:
            tokenizer = str(Path(folder) / str(vocab_size))
            rows += [
                _measure(f"train a BPE of {vocab_size}", _train, source, tokenizer, vocab_size),
                _measure(f"BPE {vocab_size}: tokenise and pack", _pack, source, tokenizer),
                _measure(f"BPE {vocab_size}: peer, tokenizer(text) each", _peer, source, tokenizer),
                _measure(f"BPE {vocab_size}: peer, encode_batch_fast", _peer_batch, source, tokenizer),
            ]
    _results.save("tokenize", arguments, rows)


def _measure(title: str, work: Callable[..., int], source: str, *arguments: object) -> dict[str, Any]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        seconds, size, tokens, peak = pool.apply(_timed, (work, source, *arguments))
    print(f"{title:44}{seconds:9.2f}{size / 1e6 / seconds:8.1f}{tokens or '':>12}{peak / 1e6:9.0f}", flush=True)
    return {"name": title, "seconds": seconds, "text_bytes": size, "tokens": tokens, "peak_bytes": peak}


def _timed(work: Callable[..., int], source: str, *arguments: object) -> tuple[float, int, int, int]:
    """Seconds, bytes of text, number of tokens, peak memory of this process in bytes."""
    size = 0

    def documents() -> Iterator[Document]:
        nonlocal size
        for document in read_documents(source):
            size += len(document.text.encode())
            yield document

    started = time.perf_counter()
    tokens = work(documents(), *arguments)
    return time.perf_counter() - started, size, tokens, own_peak_bytes()


def _read(documents: Iterable[Document]) -> int:
    for _ in documents:
        pass
    return 0


def _train(documents: Iterable[Document], folder: str, vocab_size: int) -> int:
    train_tokenizer((document.text for document in documents), "bpe", vocab_size).save_pretrained(folder)
    return 0


def _pack(documents: Iterable[Document], tokenizer: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        return pack(documents, load_tokenizer(tokenizer), Path(folder) / "packed").num_tokens


def _peer(documents: Iterable[Document], tokenizer: str) -> int:
    loaded = load_tokenizer(tokenizer)
    return sum(1 + len(loaded(document.text)["input_ids"]) for document in documents)


def _peer_batch(documents: Iterable[Document], tokenizer: str) -> int:
    """Eight documents at a time on all cores."""
    texts, backend = [document.text for document in documents], load_tokenizer(tokenizer).backend_tokenizer
    batches = (texts[first : first + 8] for first in range(0, len(texts), 8))
    return sum(1 + len(encoding.ids) for batch in batches for encoding in backend.encode_batch_fast(batch))
