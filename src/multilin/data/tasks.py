"""Synthetic tasks that ask a model to recall its input. Each sequence alone determines the right answers.

A generator makes `count` sequences of exactly `length` tokens. Each begins with the start token, which the examples
below leave out. Labels are the tokens of the answers, and IGNORED_LABEL elsewhere, so a causal language model is scored
on predicting each answer from the tokens before the answer. Examples show answers below the sequence.

As training data, a task is a `TaskText`: its sequences as training blocks, and a tokenizer for them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from multilin.data.packed_text import IGNORED_LABEL
from multilin.data.tokenizers import END_OF_TEXT
from multilin.errors import InputError, nearest
from multilin.settings import load_settings, settings
from multilin.settings.bounds import Choices, Count

TASK_PREFIX = "task:"
NUM_SEQUENCES = 2**18
"""Number of different training sequences; a run that needs more reads the same sequences again."""
VALIDATION_SEQUENCES = 2048

START, BLANK, MARK = 0, 1, 2
FIRST_SYMBOL = 3

Ids = NDArray[np.int64]


class Sequences(NamedTuple):
    """input_ids and labels, each (count, length) int64."""

    input_ids: Ids
    labels: Ids


@settings
class PairOptions:
    """Pairs of a key and a value."""

    num_keys: Count = 32  # different keys
    num_values: Choices = 32  # different values


@settings
class RecallOptions(PairOptions):
    """Pairs to remember."""

    num_pairs: Count = 8  # pairs to remember


@settings
class SymbolOptions:
    """Plain symbols."""

    num_symbols: Choices = 32  # different symbols


@settings
class CopyOptions(SymbolOptions):
    """Symbols to repeat."""

    num_copied: Count = 16  # symbols to repeat


@settings
class BitOptions:
    """Bits."""

    num_bits: Count = 15  # bits to read


Generator = Callable[[np.random.Generator, int, int, Any], Sequences]


@dataclass(frozen=True)
class Task:
    """A task: its name, its options and its sizes.

    name, options: name and options given to `find_task`.
    num_tokens: size of the vocabulary.
    shortest: the smallest possible length of a sequence.
    """

    name: str
    options: Any
    generator: Generator
    num_tokens: int
    shortest: int

    def generate(self, rng: np.random.Generator, count: int, length: int) -> Sequences:
        """Generate `count` sequences of `length` tokens.

        Raises:
            InputError: the length is too short for the options.
        """
        if length < self.shortest:
            raise InputError(
                f"model.n_positions: {length} given, but the task {self.name} with {self.options} needs at least "
                f"{self.shortest} tokens"
            )
        return self.generator(rng, count, length, self.options)

    @property
    def chance(self) -> float:
        """Accuracy of the best guess that does not read the sequence: every generator draws its answers uniformly."""
        return 1 / len(_symbols(self.options)[1])

    def __str__(self) -> str:
        given = "&".join(f"{name}={value}" for name, value in vars(self.options).items())
        return f"{self.name}?{given}"


def mqar(rng: np.random.Generator, count: int, length: int, options: RecallOptions) -> Sequences:
    """Multi-query associative recall: pairs come first, then each key comes again, in any order and place.

        A 4 C 2 F 7 . . C 2 . . A 4 . . F 7 .
                          2       4       7

    All keys differ; values may repeat. Source: Zoology (arXiv 2312.04927).
    """
    keys = FIRST_SYMBOL + _distinct(rng, count, options.num_keys, options.num_pairs)
    values = FIRST_SYMBOL + options.num_keys + rng.integers(options.num_values, size=keys.shape)
    input_ids = _blank(count, length)
    shown = 2 * options.num_pairs
    input_ids[:, 1 : shown + 1 : 2], input_ids[:, 2 : shown + 2 : 2] = keys, values
    asked = _distinct(rng, count, (length - 1 - shown) // 2, options.num_pairs)  # slots of two tokens
    places = 1 + shown + 2 * asked
    np.put_along_axis(input_ids, places, keys, axis=1)
    return _answered(input_ids, places + 1, values)


def induction(rng: np.random.Generator, count: int, length: int, options: SymbolOptions) -> Sequences:
    """The answer after the second mark is the token that followed the first mark.

        d b a * c e b a d *  c
                             c

    Source: the induction heads of H3 (arXiv 2212.14052).
    """
    input_ids = _blank(count, length)
    input_ids[:, 1:] = FIRST_SYMBOL + rng.integers(options.num_symbols, size=(count, length - 1))
    first = rng.integers(1, length - 3, size=(count, 1))
    np.put_along_axis(input_ids, first, MARK, axis=1)
    input_ids[:, -2] = MARK
    return _answered(input_ids, [length - 1], np.take_along_axis(input_ids, first + 1, axis=1))


def copy(rng: np.random.Generator, count: int, length: int, options: CopyOptions) -> Sequences:
    """Symbols, a mark, and the same symbols.

    c a d * c a d . .
            c a d
    """
    input_ids, number = _blank(count, length), options.num_copied
    symbols = FIRST_SYMBOL + rng.integers(options.num_symbols, size=(count, number))
    input_ids[:, 1 : number + 1], input_ids[:, number + 1] = symbols, MARK
    return _answered(input_ids, np.arange(number + 2, 2 * number + 2), symbols)


def selective_copy(rng: np.random.Generator, count: int, length: int, options: CopyOptions) -> Sequences:
    """Symbols among blanks, a mark, and the symbols without the blanks.

        . c . . a . d . * c a d
                          c a d

    Source: Mamba (arXiv 2312.00752), figure 2.
    """
    input_ids, number = _blank(count, length), options.num_copied
    symbols = FIRST_SYMBOL + rng.integers(options.num_symbols, size=(count, number))
    mark = length - number - 1
    places = 1 + np.sort(_distinct(rng, count, mark - 1, number), axis=1)
    np.put_along_axis(input_ids, places, symbols, axis=1)
    input_ids[:, mark] = MARK
    return _answered(input_ids, np.arange(mark + 1, length), symbols)


def needle(rng: np.random.Generator, count: int, length: int, options: PairOptions) -> Sequences:
    """A needle in a haystack: find one marked value, at any depth, among random keys and values.

        B 3 A 9 * 7 C 1 F 5 *  7
                               7

    Pairs of a key and a value fill the sequence. The first mark precedes the value that is the answer.
    """
    input_ids, slots = _blank(count, length), (length - 3) // 2
    keys = FIRST_SYMBOL + rng.integers(options.num_keys, size=(count, slots))
    values = FIRST_SYMBOL + options.num_keys + rng.integers(options.num_values, size=(count, slots))
    input_ids[:, 1 : 2 * slots + 1 : 2], input_ids[:, 2 : 2 * slots + 2 : 2] = keys, values
    depth = rng.integers(slots, size=(count, 1))
    np.put_along_axis(input_ids, 1 + 2 * depth, MARK, axis=1)
    input_ids[:, -2] = MARK
    return _answered(input_ids, [length - 1], np.take_along_axis(input_ids, 2 + 2 * depth, axis=1))


def majority(rng: np.random.Generator, count: int, length: int, options: BitOptions) -> Sequences:
    """Bits, a mark, and the more frequent bit. One bit is added to an even number of bits, to prevent ties.

    1 0 1 1 0 * 1 .
                1
    """
    number = options.num_bits | 1
    bits = rng.integers(2, size=(count, number))
    return _bits_and_answer(bits, (bits.sum(axis=1) * 2 > number).astype(np.int64), length)


def parity(rng: np.random.Generator, count: int, length: int, options: BitOptions) -> Sequences:
    """Bits, a mark, and 1 if the number of ones is odd, else 0, so that every bit matters.

    1 0 1 1 0 * 1 .
                1
    """
    bits = rng.integers(2, size=(count, options.num_bits))
    return _bits_and_answer(bits, bits.sum(axis=1) % 2, length)


def find_task(text: str) -> Task:
    """A task from its name and, after a question mark, its options: `mqar?num_pairs=16&num_keys=64`.

    Raises:
        InputError: the task or an option is unknown, or a value is not accepted.
    """
    name, _, query = text.partition("?")
    if name not in TASKS:
        raise InputError(f"task: {name!r} is not known{nearest(name, TASKS)}; known are {', '.join(TASKS)}")
    generator, kind = TASKS[name]
    options: Any = load_settings(kind, dict(parse_qsl(query, keep_blank_values=True)), f"task.{name}")
    if isinstance(options, RecallOptions) and options.num_pairs > options.num_keys:
        raise InputError(
            f"task.{name}.num_pairs: {options.num_pairs} given, but it must be at most num_keys {options.num_keys}"
        )
    asking, answering = _symbols(options)
    num_tokens = FIRST_SYMBOL + len(asking) + len(answering)
    return Task(name, options, generator, num_tokens, _shortest(name, options))


TASKS: dict[str, tuple[Generator, type]] = {
    "mqar": (mqar, RecallOptions),
    "induction": (induction, SymbolOptions),
    "copy": (copy, CopyOptions),
    "selective_copy": (selective_copy, CopyOptions),
    "needle": (needle, PairOptions),
    "majority": (majority, BitOptions),
    "parity": (parity, BitOptions),
}
"""Maps the name of every task to its generator and its options."""


def token_names(task: Task) -> list[str]:
    """The text of each token of a task: `.` blank, `*` mark, k keys, v values, s symbols, 0 and 1."""
    return [END_OF_TEXT, ".", "*", *_symbols(task.options)[0], *_symbols(task.options)[1]]


def _blank(count: int, length: int) -> Ids:
    input_ids = np.full((count, length), BLANK, dtype=np.int64)
    input_ids[:, 0] = START
    return input_ids


def _answered(input_ids: Ids, places: ArrayLike, answers: Ids) -> Sequences:
    """Sequences with (count, number) answers. Places are (count, number), or (number,) if the same in every row."""
    places, labels = np.broadcast_to(places, answers.shape), np.full_like(input_ids, IGNORED_LABEL)
    for row in (input_ids, labels):
        np.put_along_axis(row, places, answers, axis=1)
    return Sequences(input_ids, labels)


def _distinct(rng: np.random.Generator, count: int, among: int, number: int) -> Ids:
    """(count, number) numbers below `among`, in random order; the numbers in a row are different."""
    return rng.random((count, among)).argsort(axis=1)[:, :number]


def _bits_and_answer(bits: Ids, answers: Ids, length: int) -> Sequences:
    input_ids, number = _blank(len(bits), length), bits.shape[1]
    input_ids[:, 1 : number + 1], input_ids[:, number + 1] = FIRST_SYMBOL + bits, MARK
    return _answered(input_ids, [number + 2], FIRST_SYMBOL + answers[:, None])


def _symbols(options: Any) -> tuple[list[str], list[str]]:
    """The names of the symbols that are never answers, and of the symbols that can be answers."""
    if isinstance(options, PairOptions):
        return [f"k{i}" for i in range(options.num_keys)], [f"v{i}" for i in range(options.num_values)]
    return [], ["0", "1"] if isinstance(options, BitOptions) else [f"s{i}" for i in range(options.num_symbols)]


def _shortest(name: str, options: Any) -> int:
    if isinstance(options, RecallOptions):
        return 1 + 4 * options.num_pairs
    if isinstance(options, CopyOptions):
        return 2 + 2 * options.num_copied
    if isinstance(options, BitOptions):
        return 3 + (options.num_bits | (name == "majority"))
    return 5


def is_task(source: str) -> bool:
    """True if a source is a task: `task:mqar?num_pairs=8`."""
    return source.startswith(TASK_PREFIX)


class TaskBlocks(torch.utils.data.Dataset[dict[str, Tensor]]):
    """The sequences of a task, the same in every run; items {"input_ids", "labels"}, each (length,) int64."""

    def __init__(self, task: Task, length: int, part: int, number: int) -> None:
        self.task, self.length, self.part, self.number = task, length, part, number
        task.generate(np.random.default_rng(0), 1, length)  # refuses a length that is too short

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sequences = self.task.generate(np.random.default_rng([self.part, index]), 1, self.length)
        return {name: torch.from_numpy(rows[0]) for name, rows in sequences._asdict().items()}


@dataclass(frozen=True)
class TaskPart:
    """The training or the validation side of a task, with the methods of a packed text."""

    task: Task
    part: int  # 0 for training, 1 for validation
    number: int

    def blocks(self, block_size: int) -> TaskBlocks:
        """The sequences of length `block_size`."""
        return TaskBlocks(self.task, block_size, self.part, self.number)

    def num_scored(self, length: int, max_tokens: int | None) -> int:
        """The number of sequences that a validation of at most `max_tokens` tokens scores."""
        return self.number if max_tokens is None else min(self.number, max(1, max_tokens // length))

    def num_answers(self, length: int, max_tokens: int | None) -> int:
        """The number of answer tokens in the `num_scored` sequences; all sequences of a task have equally many."""
        labels = self.task.generate(np.random.default_rng(0), 1, length).labels
        return self.num_scored(length, max_tokens) * int((labels != IGNORED_LABEL).sum())

    def token_counts(self) -> NDArray[np.int64]:
        """(num_tokens,) ones, since true counts would depend on the length of sequences."""
        return np.ones(self.task.num_tokens, dtype=np.int64)

    def describe(self) -> dict[str, Any]:
        """The task and its sizes as plain data, for a run's data.json."""
        return {"task": str(self.task), "sequences": self.number, "vocab_size": self.task.num_tokens}


@dataclass(frozen=True)
class TaskText:
    """The tokenizer and the sequences of a task; corresponds to `PreparedText` for a text."""

    tokenizer: PreTrainedTokenizerFast
    train: TaskPart
    validation: TaskPart

    @property
    def identity(self) -> str:
        """The task and its options."""
        return str(self.train.task)


def task_text(source: str) -> TaskText:
    """The task that a source names.

    Raises:
        InputError: see `find_task`.
    """
    task = find_task(source.removeprefix(TASK_PREFIX))
    words = Tokenizer(models.WordLevel({name: index for index, name in enumerate(token_names(task))}, unk_token="."))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, unk_token=".", pad_token="."
    )
    return TaskText(tokenizer, TaskPart(task, 0, NUM_SEQUENCES), TaskPart(task, 1, VALIDATION_SEQUENCES))
