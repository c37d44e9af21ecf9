"""Tokenizers on the command line: trained into a folder, and shown."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerFast

from multilin.data.corpora import read_documents
from multilin.data.encoding import Encoder, make_encoder
from multilin.data.tokenizers import load_tokenizer, train_tokenizer
from multilin.errors import InputError
from multilin.progress import staged
from multilin.settings import settings
from multilin.settings.bounds import PathText, Vocabulary


@settings
class TokenizerSettings:
    """A tokenizer to train."""

    source: PathText  # text: a built-in corpus, a file, folder or glob, or a dataset of the Hugging Face hub
    output: PathText  # folder to write it to
    kind: Literal["bpe", "unigram", "byte"] = "bpe"  # how text becomes tokens
    vocab_size: Vocabulary = 4096  # entries of the vocabulary (a byte tokenizer always has 258)
    text_field: str = "text"  # the field or column of .jsonl, .csv and .parquet files that holds the text
    encoding_errors: Literal["strict", "replace"] = "strict"  # bytes that are not UTF-8: refuse, or replace by U+FFFD
    overwrite: bool = False  # replace the tokenizer in the output folder


@dataclass(frozen=True)
class TokenizerInfo:
    """A tokenizer, and how it cuts a text.

    special_tokens: role to token.
    tokens, bytes, bytes_per_token: of the source's text; None where none was given.
    pieces: tokens of the given text, each as text, U+FFFD for what is not a whole character; None where none was given.
    """

    vocabulary: int
    special_tokens: dict[str, str]
    tokens: int | None = None
    bytes: int | None = None
    bytes_per_token: float | None = None
    pieces: list[str] | None = None


def train_into_folder(settings: TokenizerSettings) -> PreTrainedTokenizerFast:
    """Train a tokenizer and save it, complete or not at all.

    Raises:
        InputError: the folder holds something already or cannot be written, or the text does not do.
    """
    output = Path(settings.output)
    if output.exists() and not (settings.overwrite and (output / "tokenizer.json").is_file()):
        hint = ", or replace it with --overwrite" if (output / "tokenizer.json").is_file() else ""
        raise InputError(f"OUTPUT: {output} exists already; give a new folder{hint}")
    with staged() as progress:

        def texts() -> Iterator[str]:
            count = 0
            for document in read_documents(
                settings.source, text_field=settings.text_field, encoding_errors=settings.encoding_errors
            ):
                yield document.text
                count += len(document.text.encode())
                progress("training the tokenizer", count)

        vocab_size = None if settings.kind == "byte" else settings.vocab_size
        tokenizer = train_tokenizer(texts(), settings.kind, vocab_size)
    beside = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        beside.mkdir(parents=True)
        tokenizer.save_pretrained(beside)
        shutil.rmtree(output, ignore_errors=True)
        beside.replace(output)
    except OSError as error:
        raise InputError(f"OUTPUT: {output} cannot be written ({error.strerror})") from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return tokenizer


def describe_tokenizer(path_or_name: str, *, source: str | None = None, text: str | None = None) -> TokenizerInfo:
    """Load a tokenizer and describe it.

    Args:
        path_or_name: see `load_tokenizer`.
        source: a text to count tokens and bytes of, see `read_documents`.
        text: a text to show the tokens of.
    """
    tokenizer = load_tokenizer(path_or_name)
    encoder = make_encoder(tokenizer)
    roles = {role: str(token) for role, token in tokenizer.special_tokens_map.items()}
    info = TokenizerInfo(len(tokenizer), roles)
    if text is not None:
        ids, _ = encoder.encode([text])
        info = replace(info, pieces=[tokenizer.decode([index]) for index in ids.tolist()])
    if source is not None:
        num_tokens, num_bytes = _count(encoder, source)
        info = replace(info, tokens=num_tokens, bytes=num_bytes, bytes_per_token=num_bytes / num_tokens)
    return info


def _count(encoder: Encoder, source: str) -> tuple[int, int]:
    """Tokens and UTF-8 bytes of a source."""
    num_tokens = num_bytes = 0
    with staged() as progress:
        for document in read_documents(source):
            num_tokens += sum(len(encoder.encode([piece])[0]) for piece in encoder.pieces(document.text))
            num_bytes += len(document.text.encode())
            progress("tokenising", num_bytes)
    return num_tokens, num_bytes


def print_tokenizer(info: TokenizerInfo, console: Console) -> None:
    """Show the description as a table."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("vocabulary", f"{info.vocabulary:,} tokens")
    for role, token in info.special_tokens.items():
        table.add_row(role, token)
    if info.bytes_per_token is not None:
        table.add_row("text", f"{info.bytes:,} bytes in {info.tokens:,} tokens")
        table.add_row("bytes per token", f"{info.bytes_per_token:.3f}")
    if info.pieces is not None:
        table.add_row("pieces", " ".join(map(repr, info.pieces)))
    console.print(table, markup=False)
