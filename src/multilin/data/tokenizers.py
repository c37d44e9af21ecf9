"""Trains and loads tokenizers. Tokenizers trained here are lossless: decoding gives the exact text back."""

import codecs
import copy
import hashlib
import json
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import huggingface_hub
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

from multilin.data.encoding import BYTES, cut_at_whitespace, token_bytes
from multilin.data.settings import BYTE_VOCAB_SIZE, DEFAULT_VOCAB_SIZE
from multilin.errors import InputError, as_input_error, shown
from multilin.files import is_path
from multilin.settings.inputs import LARGEST_JSON, check_model_files, read_bytes

END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "vocab.json", "merges.txt"),
)
"""Names of all files that transformers may write for a tokenizer."""

LONGEST_TRAINED_WORD = 1000  # characters, in the text that a tokenizer is trained on
TRAINED_BYTES = 2**22  # of different words in that text; training takes about a hundred times as much memory

_WORD = re.compile(r"[^\W\d_]+|\d+|(?:[^\w\s]|_)+")  # roughly ByteLevel's words

TokenizerKind = Literal["byte", "bpe", "unigram"]

# Settings in tokenizer_config.json that transformers writes for a truncation or padding in tokenizer.json.
_TEXT_CHANGES = (
    *("truncation", "truncation_side", "truncation_strategy", "max_length", "stride"),
    *("padding", "padding_side", "pad_to_multiple_of", "pad_token_type_id"),
)
# Names of the end of text in a bare tokenizer.json, which has no roles.
_KNOWN_ENDS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>")


def train_tokenizer(texts: Iterable[str], kind: TokenizerKind, vocab_size: int | None) -> PreTrainedTokenizerFast:
    """A tokenizer over the bytes of UTF-8, with `<|endoftext|>` (id 0; begins and ends texts) and `<|pad|>` (id 1).

    Args:
        texts: the training text, read once and not kept in memory.
        kind: `byte` (ids are 2 + byte; reads no text), `bpe` (merges of frequent pairs) or `unigram` (the most likely
            pieces under a unigram model). Tokens of `bpe` and `unigram` never cross GPT-2's word boundaries.
        vocab_size: number of tokens, including special tokens: 258 or None for `byte`, at least 259 for other kinds,
            for which None takes 4096, or as many as the text supports.

    Raises:
        InputError: the kind cannot have this vocabulary size, or the corpus does not support it.
    """
    given = f"tokenizer.vocab_size: {vocab_size} given, but a {kind} tokenizer"
    if kind == "byte":
        if vocab_size not in (None, BYTE_VOCAB_SIZE):
            raise InputError(f"{given} has {BYTE_VOCAB_SIZE} tokens")
        vocabulary = {END_OF_TEXT: 0, PAD: 1} | {character: 2 + byte for character, byte in BYTES.items()}
        tokenizer = _byte_level(models.BPE(vocab=vocabulary, merges=[]))
        tokenizer.add_special_tokens(_special_tokens())
    elif kind in ("bpe", "unigram"):
        if vocab_size is not None and vocab_size <= BYTE_VOCAB_SIZE:
            raise InputError(f"{given} needs more than {BYTE_VOCAB_SIZE} tokens (256 bytes and 2 special tokens)")
        tokenizer = _trained(texts, kind, vocab_size)
    else:
        raise InputError(f"tokenizer.kind: {kind!r} given, but it should be byte, bpe or unigram")
    return _with_roles(tokenizer, END_OF_TEXT, PAD)


def load_tokenizer(path_or_name: str) -> PreTrainedTokenizerFast:
    """Load a tokenizer from a folder with tokenizer.json, a run folder, a tokenizer.json, or the hub (by name).

    The tokenizer has an end-of-text token, and pads with this token if there is no padding token. Of several chat
    templates, only the default is kept. Settings of truncation, padding and the longest text are left out, since they
    would cut or change texts silently. Code that comes with a tokenizer is never run.

    Raises:
        InputError: there is no tokenizer, it lacks a tokenizer.json or an end-of-text token, or its ids have gaps.
    """
    path, subject = Path(path_or_name), f"tokenizer: {shown(path_or_name)}"
    if path.is_dir():
        if not (path / "tokenizer.json").is_file():
            raise InputError(f"{subject} holds no tokenizer.json")
        check_model_files(path, "tokenizer")
        named = (path / "tokenizer_config.json").is_file()
        tokenizer = _from_pretrained(str(path)) if named else _from_file(path / "tokenizer.json")
    elif path.exists():
        tokenizer = _from_file(path)
    elif is_path(path_or_name):
        raise InputError(f"{subject} does not exist; give a folder, a tokenizer.json or a hub name")
    else:
        _check_hub(path_or_name)
        tokenizer = _from_pretrained(path_or_name)
    if tokenizer.eos_token_id is None:
        raise InputError(f"{subject} has no end-of-text token (eos_token), which starts every document")
    if (largest := max(tokenizer.get_vocab().values())) >= (number := len(tokenizer)):
        raise InputError(
            f"{subject} has {number} tokens with ids up to {largest}, but they should be numbered from 0 without gaps"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return _cleaned(tokenizer)


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: str | Path) -> None:
    """Write a tokenizer, without truncation and padding, to a folder, so that no other program cuts or pads texts.

    Raises:
        OSError: the folder cannot be written.
    """
    _cleaned(copy.deepcopy(tokenizer)).save_pretrained(folder)


def start_token_id(tokenizer: PreTrainedTokenizerFast) -> int:
    """The token at the start of every document, and of every prompt that is given to a model.

    The end-of-text token is the start token: after training on packed texts, a model predicts it at the end of a text.
    If a tokenizer later got another end-of-text token, for chats, its beginning-of-text token stays the start token.
    """
    start = tokenizer.bos_token_id if tokenizer.bos_token in _KNOWN_ENDS else tokenizer.eos_token_id
    assert isinstance(start, int), "multilin loads only tokenizers with an end-of-text token"
    return start


def tokenizer_hash(tokenizer: PreTrainedTokenizerFast) -> str:
    """SHA-256 of all parts of the tokenizer that determine ids; padding and truncation do not count."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    content |= {"padding": None, "truncation": None, "eos": tokenizer.eos_token}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def trained_end(tokenizer: PreTrainedTokenizerFast, trained_hash: str) -> str | None:
    """The end-of-text token of an earlier tokenizer, from which `tokenizer` was made by adding tokens or none.

    Added tokens have the highest ids, so they are left out one by one until the remaining tokenizer has this hash.

    Args:
        tokenizer: the present tokenizer.
        trained_hash: `tokenizer_hash` of the earlier tokenizer.

    Returns:
        The token; None if the present tokenizer lacks some earlier tokens or has them in another order.
    """
    content = json.loads(tokenizer.backend_tokenizer.to_str()) | {"padding": None, "truncation": None}
    added = content.pop("added_tokens")
    ends: list[str | None] = [tokenizer.eos_token, tokenizer.bos_token, *_KNOWN_ENDS]
    for end in dict.fromkeys(ends):
        others = json.dumps(content | {"eos": end}, sort_keys=True)[1:].encode()
        for number in range(len(added), -1, -1):  # the keys are sorted, so these come first
            first = f'{{"added_tokens": {json.dumps(added[:number], sort_keys=True)}, '.encode()
            if hashlib.sha256(first + others).hexdigest() == trained_hash:
                return end
    return None


def token_byte_lengths(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Number of bytes of text in each token, 0 for special tokens; the sum over a text is the text's UTF-8 length.

    Numbers are exact for byte-level tokenizers, and approximate for SentencePiece and WordPiece, which rewrite spaces.
    """
    backend = tokenizer.backend_tokenizer
    byte_level = '"ByteLevel"' in json.dumps({k: v for k, v in json.loads(backend.to_str()).items() if k != "model"})
    added = tokenizer.added_tokens_decoder
    lengths = [0] * (max(backend.get_vocab().values()) + 1)
    for token, index in backend.get_vocab().items():
        if index in added:
            lengths[index] = 0 if added[index].special else len(added[index].content.encode())
        elif byte_level:
            lengths[index] = len(token)
        elif token.startswith("<0x") and token.endswith(">"):
            lengths[index] = 1
        else:
            lengths[index] = len(token.removeprefix("##").replace("▁", " ").encode())
    return lengths


def token_texts(tokenizer: PreTrainedTokenizerFast, token_ids: Sequence[int]) -> list[str]:
    """The text of each token by itself; bytes of incomplete characters are written as `\\xe4`."""
    return [content.decode(errors="backslashreplace") for content in _token_bytes(tokenizer, token_ids)]


def whole_characters(tokenizer: PreTrainedTokenizerFast, token_ids: Sequence[int]) -> list[tuple[int, str]]:
    """The text of a sequence, cut into the shortest runs of tokens that are whole characters.

    Returns:
        For each run the number of its tokens and its text, in which invalid bytes are written as `\\xe4`.
    """
    runs, text, num_tokens = [], "", 0
    decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
    for part in _token_bytes(tokenizer, token_ids):
        text, num_tokens = text + decoder.decode(part), num_tokens + 1
        if not decoder.getstate()[0]:  # no bytes of an incomplete character are left
            runs.append((num_tokens, text))
            text, num_tokens = "", 0
    return [*runs, (num_tokens, text + decoder.decode(b"", final=True))] if num_tokens else runs


def _token_bytes(tokenizer: PreTrainedTokenizerFast, token_ids: Sequence[int]) -> list[bytes]:
    """The UTF-8 bytes of each token by itself, which may be a part of a character."""
    names = tokenizer.convert_ids_to_tokens(list(token_ids))
    return [token_bytes(name or "", tokenizer.decode([token])) for token, name in zip(token_ids, names, strict=True)]


class VocabularyTooLarge(InputError):
    """The text has too few different pairs of tokens; `most` is the largest vocabulary that the text supports."""

    # The default is for pickle, which creates an exception from its message alone and then sets its attributes.
    def __init__(self, message: str, most: int = 0) -> None:
        super().__init__(message)
        self.most = most


def _trained(texts: Iterable[str], kind: TokenizerKind, vocab_size: int | None) -> Tokenizer:
    # The trainer holds 256 texts at a time with a hundred bytes per character, so it is given short ones.
    pieces = (part for text in texts for piece in cut_at_whitespace(text, 2**16) for part in _short_words(piece))
    sample = _Sample()
    tokenizer = _byte_level(models.BPE() if kind == "bpe" else models.Unigram())
    try:
        tokenizer.train_from_iterator(_counted(pieces, sample), _trainer(kind, vocab_size))
    except _TooManyWords:
        for piece in pieces:
            sample.add(piece)
        warnings.warn(
            "tokenizer: the text has too many different words for the memory, as is usual without spaces, so the "
            f"tokenizer is trained on {sample.kept / 1e6:.1f} of {sample.seen / 1e6:.1f} MB, spread over the text",
            stacklevel=2,
        )
        tokenizer.train_from_iterator(sample.pieces, _trainer(kind, vocab_size))
    if (most := tokenizer.get_vocab_size()) != (vocab_size or DEFAULT_VOCAB_SIZE):
        if vocab_size is not None:
            raise VocabularyTooLarge(
                f"tokenizer.vocab_size: {vocab_size} given, but the corpus supports {most} tokens; give at most "
                "this number, or more text",
                most,
            )
        warnings.warn(
            f"tokenizer.vocab_size: none given, and the text supports {most} tokens, so the tokenizer has {most} "
            f"instead of {DEFAULT_VOCAB_SIZE}, the default",
            stacklevel=2,
        )
    return tokenizer if kind == "bpe" else _reproducible(tokenizer)


def _trainer(kind: TokenizerKind, vocab_size: int | None) -> trainers.Trainer:
    return (trainers.BpeTrainer if kind == "bpe" else trainers.UnigramTrainer)(
        vocab_size=vocab_size or DEFAULT_VOCAB_SIZE,
        special_tokens=_special_tokens(),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )


class _TooManyWords(Exception):
    """The different words of a text would take too much memory."""


class _Sample:
    """Every n-th piece of a text, with n a power of two that rises with the length of the text.

    pieces: the pieces of the sample.
    kept, seen: numbers of UTF-8 bytes of the sample and of the text.
    """

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.kept = self.seen = self._count = 0
        self._step = 1

    def add(self, piece: str) -> None:
        """Count one piece of the text, and keep it if it belongs to the sample."""
        num_bytes = len(piece.encode())
        if self._count % self._step == 0:
            self.pieces.append(piece)
            self.kept += num_bytes
            while self.kept > TRAINED_BYTES and len(self.pieces) > 1:
                self.pieces, self._step = self.pieces[::2], 2 * self._step
                self.kept = sum(len(kept.encode()) for kept in self.pieces)
        self._count += 1
        self.seen += num_bytes


def _counted(pieces: Iterable[str], sample: _Sample) -> Iterator[str]:
    """Yield the pieces and add each to the sample; raise _TooManyWords if pieces hold too many different words."""
    words: set[str] = set()
    size = 0
    for piece in pieces:
        sample.add(piece)
        new = set(_WORD.findall(" ".join(set(piece.split())))) - words
        words |= new
        size += sum(len(word.encode()) for word in new)
        if size > TRAINED_BYTES:
            raise _TooManyWords
        yield piece


def _short_words(text: str) -> Iterator[str]:
    """The text, cut inside words that are too long, since finding merges takes time quadratic in a word's length."""
    start = 0
    if max(map(len, text.split()), default=0) > LONGEST_TRAINED_WORD:
        for match in re.finditer(rf"\S{{{LONGEST_TRAINED_WORD}}}(?=\S)", text):
            yield text[start : match.end()]
            start = match.end()
    yield text[start:]


def _reproducible(tokenizer: Tokenizer) -> Tokenizer:
    """The same unigram tokenizer, without random differences between trainings.

    Threads add up scores in any order, which changes the last digits, so scores are rounded. Bytes that are not likely
    pieces get the lowest scores, at most 1e-4 apart, in the random order of a hash table, so these bytes are sorted.
    """
    content = json.loads(tokenizer.to_str())
    special = content["model"]["vocab"][: len(content["added_tokens"])]
    rounded = [(piece, round(score, 6)) for piece, score in content["model"]["vocab"][len(special) :]]
    pieces, scores = map(list, zip(*sorted(rounded, key=lambda item: (-item[1], item[0])), strict=True))
    unlikely = len(pieces) - 1
    while len(pieces[unlikely - 1]) == 1 and scores[unlikely - 1] - scores[unlikely] < 1.1e-4:
        unlikely -= 1
    pieces[unlikely:] = sorted(pieces[unlikely:])
    content["model"]["vocab"] = special + list(zip(pieces, scores, strict=True))
    return Tokenizer.from_str(json.dumps(content))


def _cleaned(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """Remove, in place, settings that change texts, and all chat templates but the default; return the tokenizer."""
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    for name in _TEXT_CHANGES:
        tokenizer.init_kwargs.pop(name, None)
    for name in ("padding_side", "truncation_side"):
        setattr(tokenizer, name, getattr(type(tokenizer), name))
    tokenizer.model_max_length, tokenizer.clean_up_tokenization_spaces = VERY_LARGE_INTEGER, False
    if isinstance(tokenizer.chat_template, dict):
        tokenizer.chat_template = tokenizer.chat_template.get("default")
    return tokenizer


def _byte_level(model: models.Model) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _special_tokens() -> list[AddedToken]:
    return [AddedToken(token, special=True, normalized=False) for token in (END_OF_TEXT, PAD)]


def _with_roles(tokenizer: Tokenizer, end_of_text: str, pad: str | None) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=end_of_text, eos_token=end_of_text, pad_token=pad,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def _from_file(path: Path) -> PreTrainedTokenizerFast:
    content = read_bytes(path, "tokenizer", LARGEST_JSON)
    with as_input_error(lambda reason: f"tokenizer: {path} is not a tokenizer.json ({reason})"):
        tokenizer = Tokenizer.from_str(content.decode())
    end = next((token for token in _KNOWN_ENDS if tokenizer.token_to_id(token) is not None), None)
    if end is None:
        raise InputError(f"tokenizer: {path} has none of the end-of-text tokens {', '.join(_KNOWN_ENDS)}")
    return _with_roles(tokenizer, end, PAD if tokenizer.token_to_id(PAD) is not None else None)


def _check_hub(name: str) -> None:
    """Ask the hub once: without a connection, transformers would try again for minutes."""
    with as_input_error(
        lambda reason: (
            f"tokenizer: {shown(name)} is neither a file or folder here nor a tokenizer on the hub ({reason})"
        )
    ):
        if not isinstance(huggingface_hub.try_to_load_from_cache(name, "tokenizer.json"), str):
            huggingface_hub.HfApi().model_info(name, timeout=20)


def _from_pretrained(path_or_name: str) -> PreTrainedTokenizerFast:
    """Load the tokenizer in tokenizer.json; config.json is not read, since it may name foreign code as the model."""
    with as_input_error(lambda reason: f"tokenizer: {shown(path_or_name)} cannot be loaded ({reason})"):
        return PreTrainedTokenizerFast.from_pretrained(path_or_name)
