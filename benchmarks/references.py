"""References that need no training: interpolated n-grams and compressors, in bits per byte.

The first, third, ... documents of the validation text are scored, as in a sweep with `final_half`. Compressors see this
text alone, and after the training text. gzip gets the last 32 kB of the training text, its window, as a preset
dictionary. For xz, the size is the number of bytes by which the compressed training text grows.
"""

import argparse
import lzma
import zlib
from collections.abc import Iterator
from typing import Any

from benchmarks import _results
from multilin.data.corpora import read_documents
from multilin.data.prepare import prepare_text
from multilin.data.settings import DataRecipe, TokenizerRecipe
from multilin.training.ngrams import NgramModel

BY_NAME_ONLY = "it needs a text"
GZIP_WINDOW = 2**15


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks references", description=__doc__)
    parser.add_argument("--source", required=True, help="training text, for counting and compressing")
    parser.add_argument("--validation", required=True, help="text to score, at least two documents")
    parser.add_argument("--vocab-sizes", type=int, nargs="+", default=[2048, 4096], help="of n-grams")
    parser.add_argument("--orders", type=int, nargs="+", default=[3, 5], help="of n-grams")
    arguments = _results.parse(parser, argv)
    rows = []
    for name, bits in [*_ngrams(arguments), *_compressors(arguments)]:
        print(f"{name:44}{bits:8.3f} bits per byte", flush=True)
        rows.append({"row": name, "bits_per_byte": bits})
    _results.save("references", arguments, rows)


def _ngrams(arguments: argparse.Namespace) -> Iterator[tuple[str, float]]:
    data = DataRecipe(source=arguments.source, validation=arguments.validation, validation_part="final")
    for vocab_size in arguments.vocab_sizes:
        text = prepare_text(data, TokenizerRecipe(vocab_size=vocab_size))
        for order in arguments.orders:
            bits = NgramModel(text.train, order).bits_per_byte(text.validation)
            yield f"{order}-gram, vocabulary {vocab_size:,}", bits


def _compressors(arguments: argparse.Namespace) -> Iterator[tuple[str, float]]:
    train = _content(arguments.source, step=1)
    final = _content(arguments.validation, step=2)
    alone, after = zlib.compressobj(9, wbits=31), zlib.compressobj(9, zdict=train[-GZIP_WINDOW:])
    sizes = {
        "gzip": _size(alone, final),
        "gzip after the last 32 kB of training text": _size(after, final),
        "xz": _size(_xz(len(final)), final),
    }
    window = len(train) + len(final)
    sizes["xz after the training text"] = _size(_xz(window), train + final) - _size(_xz(window), train)
    for name, size in sizes.items():
        yield name, 8 * size / len(final)


def _content(source: str, step: int) -> bytes:
    return "".join(document.text for document in list(read_documents(source))[::step]).encode()


def _xz(window: int) -> lzma.LZMACompressor:
    """xz -9e with a window of at least `window` bytes."""
    size = max(2**16, min(1 << (window - 1).bit_length(), 1536 * 2**20))
    preset = 9 | lzma.PRESET_EXTREME
    return lzma.LZMACompressor(filters=[{"id": lzma.FILTER_LZMA2, "preset": preset, "dict_size": size}])


def _size(compressor: Any, content: bytes) -> int:
    return len(compressor.compress(content)) + len(compressor.flush())
