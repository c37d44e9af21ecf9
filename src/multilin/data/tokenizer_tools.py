"""Trains a tokenizer into a folder, and describes a tokenizer."""

import itertools
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from multilin.data.added_text import plain_tokenizer
from multilin.data.corpora import read_documents
from multilin.data.encoding import make_encoder
from multilin.data.prepare import reported_texts
from multilin.data.progress import Progress, no_progress
from multilin.data.settings import TokenizerShowArguments, TokenizerTrainArguments
from multilin.data.tokenizers import TOKENIZER_FILES, load_tokenizer, save_tokenizer, train_tokenizer
from multilin.errors import InputError, shown
from multilin.files import atomic_folder, check_folder


@dataclass(frozen=True)
class TokenizerInfo:
    """A tokenizer, and how it cuts a text.

    special_tokens: maps each role to its token.
    tokens, bytes, bytes_per_token: sizes of the source's text; None without a source.
    pieces: the part of the given text for each token; the joined parts are the text. If several tokens spell a
        character, it belongs to the last of these tokens. `pieces` is None without a text.
    """

    vocabulary: int
    special_tokens: dict[str, str]
    tokens: int | None = None
    bytes: int | None = None
    bytes_per_token: float | None = None
    pieces: list[str] | None = None


def train_into_folder(arguments: TokenizerTrainArguments, progress: Progress = no_progress) -> PreTrainedTokenizerFast:
    """Train a tokenizer on the text of a source by `train_tokenizer`, and save the tokenizer to a new folder.

    With `overwrite` the folder may hold a tokenizer, which is replaced.

    Raises:
        InputError: the folder is not empty or cannot be written, or the text cannot be used.
        OSError: writing fails, for example because the disk is full.
    """
    check_folder("OUTPUT", arguments.output)
    _check_replaceable(Path(arguments.output), arguments.overwrite)
    documents = read_documents(
        arguments.source, text_field=arguments.text_field, encoding_errors=arguments.encoding_errors
    )
    tokenizer = train_tokenizer(reported_texts(documents, progress), arguments.kind, arguments.vocab_size)
    with atomic_folder(arguments.output) as partial:
        save_tokenizer(tokenizer, partial)
    return tokenizer


def _check_replaceable(folder: Path, overwrite: bool) -> None:
    """Refuse a folder that is not empty, unless it holds only a tokenizer that may be replaced."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    holds_tokenizer = "tokenizer.json" in names and names <= set(TOKENIZER_FILES)
    if names and not (overwrite and holds_tokenizer):
        hint = ", or replace it with --overwrite" if holds_tokenizer else ""
        raise InputError(f"OUTPUT: {folder} exists already; give a new folder{hint}")


def describe_tokenizer(arguments: TokenizerShowArguments, progress: Progress = no_progress) -> TokenizerInfo:
    """Load a tokenizer, count the tokens and bytes of a source, and cut a text into tokens.

    Raises:
        InputError: the tokenizer or the source cannot be used.
    """
    for name in ("text_field", "encoding_errors"):
        if arguments.source is None and getattr(arguments, name) != getattr(TokenizerShowArguments, name):
            raise InputError(f"--{name.replace('_', '-')}: given without --source, which names the text; give both")
    tokenizer = load_tokenizer(arguments.tokenizer)
    encoder = make_encoder(tokenizer)
    roles = {role: str(token) for role, token in tokenizer.special_tokens_map.items()}
    info = TokenizerInfo(len(tokenizer), roles)
    if arguments.text is not None:
        info = replace(info, pieces=_pieces(tokenizer, arguments.text))
    if arguments.source is not None:
        tokens = num_bytes = 0
        for document in read_documents(
            arguments.source, text_field=arguments.text_field, encoding_errors=arguments.encoding_errors
        ):
            tokens += sum(len(encoder.encode([piece])[0]) for piece in encoder.pieces(document.text))
            num_bytes += len(document.text.encode())
            progress("tokenising", num_bytes)
        if not tokens:
            raise InputError(f"--source: this tokenizer makes no token of {shown(arguments.source)}")
        info = replace(info, tokens=tokens, bytes=num_bytes, bytes_per_token=num_bytes / tokens)
    return info


def _pieces(tokenizer: PreTrainedTokenizerFast, text: str) -> list[str]:
    """The pieces of the text, cut where tokens end."""
    backend = plain_tokenizer(tokenizer.backend_tokenizer.to_str())
    encoded = backend.encode(text, add_special_tokens=False)
    ends = list(itertools.accumulate((end for _, end in encoded.offsets), max))
    pieces, begin = [], 0
    for end, following in itertools.pairwise([*ends, -1]):
        cut = begin if end == following else end
        pieces.append(text[begin:cut])
        begin = cut
    return [*pieces[:-1], pieces[-1] + text[begin:]] if pieces else pieces
