"""Tokenizers trained into a folder, and described."""

from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from multilin.data.corpora import read_documents
from multilin.data.encoding import make_encoder
from multilin.data.prepare import reported_texts
from multilin.data.progress import Progress, no_progress
from multilin.data.settings import TokenizerTrainArguments
from multilin.data.tokenizers import TOKENIZER_FILES, load_tokenizer, save_tokenizer, train_tokenizer
from multilin.errors import InputError, shown
from multilin.files import atomic_folder, check_folder


@dataclass(frozen=True)
class TokenizerInfo:
    """A tokenizer, and how it cuts a text.

    special_tokens: role to token.
    tokens, bytes, bytes_per_token: sizes of the source's text; None without a source.
    pieces: text of each token of the given text, with U+FFFD for incomplete characters; None without a text.
    """

    vocabulary: int
    special_tokens: dict[str, str]
    tokens: int | None = None
    bytes: int | None = None
    bytes_per_token: float | None = None
    pieces: list[str] | None = None


def train_into_folder(arguments: TokenizerTrainArguments, progress: Progress = no_progress) -> PreTrainedTokenizerFast:
    """Train a tokenizer, see `train_tokenizer`, on the text of a source and save it to a new folder.

    With `overwrite` the folder may hold a tokenizer, which is replaced. A byte tokenizer ignores `vocab_size`.

    Raises:
        InputError: the folder is not empty or cannot be written, or the text cannot be used.
        OSError: writing fails, because the disk is full for example.
    """
    check_folder("OUTPUT", arguments.output)
    _check_replaceable(Path(arguments.output), arguments.overwrite)
    documents = read_documents(
        arguments.source, text_field=arguments.text_field, encoding_errors=arguments.encoding_errors
    )
    vocab_size = None if arguments.kind == "byte" else arguments.vocab_size
    tokenizer = train_tokenizer(reported_texts(documents, progress), arguments.kind, vocab_size)
    with atomic_folder(arguments.output) as partial:
        save_tokenizer(tokenizer, partial)
    return tokenizer


def _check_replaceable(folder: Path, overwrite: bool) -> None:
    """Refuse a folder that holds anything but a tokenizer that may be replaced."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    holds_tokenizer = "tokenizer.json" in names and names <= set(TOKENIZER_FILES)
    if names and not (overwrite and holds_tokenizer):
        hint = ", or replace it with --overwrite" if holds_tokenizer else ""
        raise InputError(f"OUTPUT: {folder} exists already; give a new folder{hint}")


def describe_tokenizer(
    path_or_name: str, *, source: str | None = None, text: str | None = None, progress: Progress = no_progress
) -> TokenizerInfo:
    """Load a tokenizer, count the tokens and bytes of a source, and cut a text into tokens."""
    tokenizer = load_tokenizer(path_or_name)
    encoder = make_encoder(tokenizer)
    roles = {role: str(token) for role, token in tokenizer.special_tokens_map.items()}
    info = TokenizerInfo(len(tokenizer), roles)
    if text is not None:
        ids, _ = encoder.encode([text])
        info = replace(info, pieces=[tokenizer.decode([index]) for index in ids.tolist()])
    if source is not None:
        tokens = num_bytes = 0
        for document in read_documents(source):
            tokens += sum(len(encoder.encode([piece])[0]) for piece in encoder.pieces(document.text))
            num_bytes += len(document.text.encode())
            progress("tokenising", num_bytes)
        if not tokens:
            raise InputError(f"--source: {shown(source)} has no token for this tokenizer")
        info = replace(info, tokens=tokens, bytes=num_bytes, bytes_per_token=num_bytes / tokens)
    return info
