"""A recall task as training data: its sequences as training blocks, and a tokenizer for them."""

import dataclasses
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from multilin.data.packed_text import IGNORED_LABEL
from multilin.data.tasks import Task, find_task, token_names
from multilin.data.tokenizers import END_OF_TEXT

TASK_PREFIX = "task:"
NUM_SEQUENCES = 2**18
"""Different training sequences; a run that reads more begins again."""
VALIDATION_SEQUENCES = 2048


def is_task(source: str) -> bool:
    """True if a source is a task: `task:mqar?num_pairs=8`."""
    return source.startswith(TASK_PREFIX)


class TaskBlocks(torch.utils.data.Dataset[dict[str, Tensor]]):
    """The sequences of a task by number, the same in every run; {"input_ids", "labels"}, each (length,) int64."""

    def __init__(self, task: Task, length: int, part: int, number: int) -> None:
        self.task, self.length, self.part, self.number = task, length, part, number
        task.generate(np.random.default_rng(0), 1, length)  # refuses a length that is too short

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sequences = self.task.generate(np.random.default_rng([self.part, index]), 1, self.length)
        return {name: torch.from_numpy(rows[0]) for name, rows in sequences._asdict().items()}


@dataclasses.dataclass(frozen=True)
class TaskPart:
    """The training or the validation side of a task, with the methods of a packed text."""

    task: Task
    part: int  # 0 for training, 1 for validation
    number: int

    def blocks(self, block_size: int) -> TaskBlocks:
        """The sequences at this length."""
        return TaskBlocks(self.task, block_size, self.part, self.number)

    def num_scored(self, length: int, max_tokens: int | None) -> int:
        """How many sequences of this length a validation of at most `max_tokens` tokens scores."""
        return self.number if max_tokens is None else min(self.number, max(1, max_tokens // length))

    def num_answers(self, length: int, max_tokens: int | None) -> int:
        """How many answers they ask for: every sequence of a task asks for as many."""
        labels = self.task.generate(np.random.default_rng(0), 1, length).labels
        return self.num_scored(length, max_tokens) * int((labels != IGNORED_LABEL).sum())

    def token_counts(self) -> NDArray[np.int64]:
        """(num_tokens,) ones: how often a token occurs depends on the length."""
        return np.ones(self.task.num_tokens, dtype=np.int64)

    def describe(self) -> dict[str, Any]:
        """The task and its sizes as plain data, for a run's data.json."""
        return {"task": str(self.task), "sequences": self.number, "vocab_size": self.task.num_tokens}


@dataclasses.dataclass(frozen=True)
class TaskText:
    """The tokenizer and the sequences of a task, as `PreparedText` is for a text."""

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
