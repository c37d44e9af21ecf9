"""`train --minutes`: choose a recipe for a text and a time, from this machine's measured speed and a table of models.

Each row of the table is a model size and the fewest training tokens for which that size is useful. Sizes are measured
on this machine, the smallest first; the largest size that reads enough tokens in the time is picked. A small text
limits the parameters and the passes over the text, and the square root of its bytes limits the vocabulary.
"""

import dataclasses
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from multilin.analysis.compare.sweep import builtin_sweep, nested
from multilin.analysis.costs import parameter_counts
from multilin.analysis.plan import find_vocab_size, step_seconds
from multilin.data.corpora import read_documents
from multilin.data.prepared import PreparedText
from multilin.data.settings import BYTE_VOCAB_SIZE, DataRecipe
from multilin.data.tasks import is_task
from multilin.data.tokenizers import VocabularyTooLarge
from multilin.errors import InputError, prefixed
from multilin.model.memory import FLOAT_BYTES, activation_bytes, available_memory, parameter_bytes
from multilin.settings.bounds import MOST_STEPS
from multilin.training.assemble import check_model, create_network, read_text
from multilin.training.environment import num_processes
from multilin.training.fields import merge
from multilin.training.ngrams import NgramModel
from multilin.training.optimizers import optimizer_bytes
from multilin.training.precision import autocast_dtype
from multilin.training.processes import accelerator_or_cpu
from multilin.training.progress import TrainingProgress
from multilin.training.recipe import Recipe, given_fields, load_recipe
from multilin.training.resolve import resolve_recipe
from multilin.training.time_limit import ENDING, FIRST_SAVE


@dataclasses.dataclass(frozen=True)
class Size:
    """A row of the table: a model size for runs of at least `fewest_tokens` training tokens."""

    fewest_tokens: float
    hidden_size: int
    num_layers: int
    vocab_size: int


TABLE = (
    Size(0, 64, 4, 4096), Size(1.1e6, 96, 4, 8192), Size(3.5e6, 128, 4, 8192), Size(8e6, 160, 4, 8192),
    Size(12e6, 192, 4, 8192), Size(22e6, 256, 4, 8192), Size(32e6, 256, 6, 8192), Size(8e7, 320, 6, 8192),
    Size(1.6e8, 384, 8, 8192), Size(2.4e8, 512, 8, 8192), Size(5e8, 640, 8, 8192),
)  # fmt: skip
"""Model sizes, the smallest first, from the runs in results/minutes.md; those with 6 and 8 layers are extrapolated."""
ARCHITECTURE = "tscale"  # with the lowest bits per byte in results/compare.md
VOCABULARIES = 512, 1024, 2048, 4096, 8192
ENTRIES = 3.0  # most vocabulary entries, divided by the square root of the text's bytes
MOST_PASSES = 5
MOST_PARAMETERS = 2 / 3  # parameters per byte of text, without embeddings and output
SHORT_RUN = 4, 256  # blocks in a step, and tokens in a block
LONG_RUN, LONG_TOKENS = (8, 512), 4_000_000  # for runs of at least LONG_TOKENS; larger steps are faster
WARMUP_SHARE, LONGEST_WARMUP = 0.04, 100
BY_HEART = 1.0  # parameters per byte times (passes - 1) from which TScale needs a stronger weight decay
BY_HEART_DECAY = 0.05  # the stronger weight decay, in steps of `SHORT_RUN`

COUNTED_BYTES = 10**8  # a text is counted up to this size, about what a small machine reads in some hours
COUNTED_NGRAMS = 300_000  # n-grams for the counting model of three tokens
MEASURING_SHARE = 0.25  # share of the whole time after which measuring the machine stops
TRAINING_SHARE = 0.9  # share of the remaining time for steps; the rest is for validating, saving and loading
VALIDATIONS = 4  # validations before the last one
VALIDATED_SHARE, FEWEST_VALIDATED, MOST_VALIDATED = 0.05, 10_000, 100_000  # tokens; the share is of training tokens
MINUTES_BETWEEN_SAVES = 3  # at most, of saving the run
START_AND_END = 10.0  # least seconds of a run before its first step and after its last one, together


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A size on this machine: its speed in training, and its parameters outside embeddings and output."""

    size: Size
    parameters: int
    tokens_per_second: float


@dataclasses.dataclass(frozen=True)
class Pick:
    """A recipe for a number of minutes, and the figures that decided it.

    recipe: the resolved recipe. Its run ends after the minutes, or after `MOST_PASSES` passes over the text.
    candidate: the size that was picked. tokens: training tokens of the run.
    train_tokens, train_bytes: size of the training text. trigram: bits per byte of a trigram model.
    remarks: sentences for the user.
    """

    recipe: Recipe
    candidate: Candidate
    tokens: int
    train_tokens: int
    train_bytes: int
    trigram: float
    remarks: list[str]

    @property
    def with_steps(self) -> Recipe:
        """The recipe with `training.minutes` replaced by the number of steps that takes about this time."""
        training = self.recipe.training
        blocks = training.global_batch_size or training.batch_size
        steps = max(1, round(self.tokens / (blocks * self.recipe.model.n_positions)))
        return dataclasses.replace(self.recipe, training=dataclasses.replace(training, minutes=None, max_steps=steps))


def pick(
    name: str | None, changes: Mapping[str, Any], minutes: float, began: float, progress: TrainingProgress
) -> Pick:
    """Choose the fields that the user did not give, for a run of some minutes.

    Args:
        name: a recipe whose fields are kept, or None.
        changes: dotted fields of the recipe that the user gave, with their values.
        minutes: time that the whole command may take.
        began: `time.monotonic()` at the start of the command.
        progress: shows the current stage of the work.

    Raises:
        InputError: a recipe or a text that cannot be used, a field that `--minutes` decides, or too little time.
    """
    picker = _Picker(name, {"training.minutes": minutes, **changes})
    picker.check()
    progress.message("measuring this machine and the text")
    text = None if picker.given_vocabulary is None else picker.read_text(picker.given_vocabulary, progress)
    train_bytes = count_bytes(picker.base.data) if text is None else text.train.num_bytes
    seconds, until = _training_seconds(minutes, began), began + MEASURING_SHARE * 60 * minutes
    measured = list(picker.measure(train_bytes, seconds, until))
    if text is None:
        text = picker.read_text(choose(measured, seconds, train_bytes).size.vocab_size, progress)
    train_bytes, seconds = text.train.num_bytes, _training_seconds(minutes, began)
    picked = choose(measured, seconds, train_bytes)
    picked = dataclasses.replace(picked, size=dataclasses.replace(picked.size, vocab_size=len(text.tokenizer)))
    most_tokens = MOST_PASSES * text.train.num_tokens
    if min(seconds * picked.tokens_per_second, most_tokens) >= LONG_TOKENS:
        picker.step = LONG_RUN
        picked = picker.measured(picked.size, until) if time.monotonic() < until else picked
    tokens = max(1, round(min(seconds * picked.tokens_per_second, most_tokens)))
    remarks = []
    if tokens == most_tokens:
        steps = tokens / picked.tokens_per_second / TRAINING_SHARE
        needed = time.monotonic() - began + steps + START_AND_END
        remarks.append(
            f"More than {MOST_PASSES} passes over this text would overfit, so the run ends after {MOST_PASSES} passes, "
            f"in about {min(needed / 60, minutes):.1f} minutes. A longer run needs more text."
        )
    by_heart = picked.parameters / train_bytes * (tokens / text.train.num_tokens - 1)
    recipe = picker.recipe(picked.size, tokens, is_known_by_heart=by_heart >= BY_HEART, most_tokens=most_tokens)
    trigram = NgramModel(text.train, 3, COUNTED_NGRAMS).bits_per_byte(text.validation, COUNTED_NGRAMS)
    return Pick(recipe, picked, tokens, text.train.num_tokens, train_bytes, trigram, remarks)


def choose(measured: Iterable[Candidate], seconds: float, train_bytes: int) -> Candidate:
    """Return the largest candidate for which time and text suffice, else the smallest; `measured` is sorted by size."""
    smallest, *larger = measured
    best = smallest
    for one in larger:
        if one.parameters <= MOST_PARAMETERS * train_bytes and seconds * one.tokens_per_second > one.size.fewest_tokens:
            best = one
    return best


def count_bytes(data: DataRecipe) -> int:
    """Count the bytes of a text, up to about `COUNTED_BYTES`.

    Raises:
        InputError: the text cannot be read.
    """
    total = 0
    with prefixed("data.source: "):
        for document in read_documents(data.source, text_field=data.text_field, encoding_errors=data.encoding_errors):
            total += len(document.text.encode())
            if total >= COUNTED_BYTES:
                break
    return total


def recipe_values(
    architecture: str, size: Size, steps: float, step: tuple[int, int], is_known_by_heart: bool = False
) -> dict[str, Any]:
    """The dotted fields and values of a run of about `steps` steps, each of `step` (blocks, tokens per block).

    Options, optimizer and learning rate come from the architecture's row of the built-in sweep, tuned with steps of
    `SHORT_RUN`. For larger steps the rate grows with the square root of the tokens in a step, as usual for Adam. A
    TScale model that would learn its text by heart gets a stronger weight decay, which grows in the same way.
    """
    sweep = builtin_sweep()
    row = nested(sweep.rows.get(architecture) or {}, f"rows.{architecture}")
    values = merge(merge({"model": {"architecture": architecture}}, nested(sweep.base, "base")), row)
    growth = math.sqrt(math.prod(step) / math.prod(SHORT_RUN))
    values["optimizer"]["learning_rate"] *= growth
    if is_known_by_heart and architecture == ARCHITECTURE:
        values["optimizer"]["weight_decay"] = BY_HEART_DECAY * growth
    sections = {name: values["model"].get(name, {}) for name in ("options", "config")}
    return {
        "model.architecture": architecture,
        "model.hidden_size": size.hidden_size,
        "model.num_layers": size.num_layers,
        "model.n_positions": step[1],
        **{f"model.{section}.{name}": value for section, part in sections.items() for name, value in part.items()},
        "tokenizer.kind": "byte" if size.vocab_size == BYTE_VOCAB_SIZE else "bpe",
        "tokenizer.vocab_size": None if size.vocab_size == BYTE_VOCAB_SIZE else size.vocab_size,
        **{f"optimizer.{name}": value for name, value in values["optimizer"].items()},
        "schedule.name": "linear",
        "schedule.warmup_steps": round(min(LONGEST_WARMUP, WARMUP_SHARE * steps)),
        "training.batch_size": step[0],
    }


def _training_seconds(minutes: float, began: float) -> float:
    """The seconds that remain for training steps after the time reserved for the end of the run is subtracted.

    Raises:
        InputError: the time is too short to train.
    """
    used = time.monotonic() - began
    left = 60 * minutes - used
    if (seconds := min(TRAINING_SHARE * left, left - ENDING - 2 * FIRST_SAVE)) <= used / 10:
        raise InputError(f"--minutes: {minutes:g} given, but reading and measuring took {used:.0f} s; give more time")
    return seconds


class _Picker:
    """Makes recipes from the fields that the user gave, and chooses the other fields."""

    def __init__(self, name: str | None, changes: Mapping[str, Any]) -> None:
        self.name, self.changes, self.given = name, changes, given_fields(name, changes)
        self.base = load_recipe(name, changes)
        self.architecture = self.given.get("model.architecture") or ARCHITECTURE
        self.step = SHORT_RUN
        data, tokenizer = self.base.data, self.base.tokenizer
        self._has_tokenizer = data.is_prepared or tokenizer.path is not None or tokenizer.kind == "byte"
        self._is_bytes_allowed = self.given.get("tokenizer.kind") is None
        self.given_vocabulary: int | None = None

    def check(self) -> None:
        """Refuse a recipe that the table cannot complete, and find the size of the vocabulary if the user gave one."""
        if num_processes() > 1:
            raise InputError("--minutes: works in one process only; under torchrun, give --training.minutes")
        if is_task(self.base.data.name):
            raise InputError(
                f"data.source: {self.base.data.name} is a task, but --minutes needs a text; give --training.minutes"
            )
        if self.base.model.start is not None:
            raise InputError(
                f"model.start: {self.base.model.start} given, but --minutes picks a new model; give --training.minutes"
            )
        self.given_vocabulary = find_vocab_size(self.base) if self._has_tokenizer else self.base.tokenizer.vocab_size
        check_model(resolve_recipe(self.recipe(self.sizes(BYTE_VOCAB_SIZE)[0])))

    def sizes(self, most_entries: float) -> list[Size]:
        """The rows of the table, the smallest first, with the user's fields and vocabularies up to `most_entries`."""
        found: dict[tuple[int, int], Size] = {}
        for row in TABLE:
            width = self.given.get("model.hidden_size") or row.hidden_size
            depth = self.given.get("model.num_layers") or row.num_layers
            vocab_size = self.given_vocabulary or self._vocabulary(min(row.vocab_size, most_entries))
            found.setdefault((width, depth), Size(row.fewest_tokens, width, depth, vocab_size))
        return list(found.values())

    def _vocabulary(self, most: float) -> int:
        """The largest of VOCABULARIES up to `most`; if all are larger, single bytes if allowed, else the smallest."""
        fewest = BYTE_VOCAB_SIZE if self._is_bytes_allowed else VOCABULARIES[0]
        return max((size for size in VOCABULARIES if size <= most), default=fewest)

    def read_text(self, vocab_size: int, progress: TrainingProgress) -> PreparedText:
        """Read the text with a vocabulary of this size, or with the largest that the text supports."""
        try:
            return self._read(vocab_size, progress)
        except VocabularyTooLarge as error:
            if self.given_vocabulary is not None or (not self._is_bytes_allowed and error.most <= BYTE_VOCAB_SIZE):
                raise
            fewest = BYTE_VOCAB_SIZE if self._is_bytes_allowed else error.most
            return self._read(max((size for size in VOCABULARIES if size <= error.most), default=fewest), progress)

    def _read(self, vocab_size: int, progress: TrainingProgress) -> PreparedText:
        size = dataclasses.replace(self.sizes(vocab_size)[0], vocab_size=vocab_size)
        return read_text(self.recipe(size), progress.prepare)

    def measure(self, train_bytes: int, seconds: float, until: float) -> Iterator[Candidate]:
        """Measure the smallest size, then larger sizes until memory, text or time do not suffice for the next size."""
        memory = available_memory() or math.inf
        for number, size in enumerate(self.sizes(ENTRIES * math.sqrt(train_bytes))):
            needed, parameters = self._count(size)
            is_too_large = needed > memory or parameters > MOST_PARAMETERS * train_bytes
            if number and (is_too_large or time.monotonic() > until):
                return
            found = self.measured(size, until)
            yield found
            if seconds * found.tokens_per_second < size.fewest_tokens:
                return

    def measured(self, size: Size, until: float) -> Candidate:
        """Measure the speed of a size in training on this machine."""
        recipe = self.recipe(size)
        seconds = step_seconds(recipe, size.vocab_size, until, accelerator_or_cpu())
        tokens = recipe.training.batch_size * recipe.model.n_positions
        return Candidate(size, self._count(size)[1], tokens / seconds)

    def _count(self, size: Size) -> tuple[float, int]:
        """The least bytes that training needs, and the number of parameters outside embeddings and output."""
        recipe = resolve_recipe(self.recipe(size))
        with torch.device("meta"):
            model = create_network(recipe, size.vocab_size, None)
        total, in_embeddings = parameter_counts(model)
        number_bytes = FLOAT_BYTES if autocast_dtype(recipe.training.precision) is None else 2
        weights = 2 * parameter_bytes(model) + optimizer_bytes(recipe.optimizer, model)
        tokens = recipe.training.batch_size * recipe.model.n_positions
        return weights + activation_bytes(model, tokens, number_bytes=number_bytes), total - in_embeddings

    def recipe(
        self, size: Size, tokens: int = 10**6, is_known_by_heart: bool = False, most_tokens: int | None = None
    ) -> Recipe:
        """The recipe of a size, for about `tokens` training tokens.

        The run ends after `most_tokens`, unless the minutes end it before.
        """
        blocks = self.given.get("training.global_batch_size") or self.given.get("training.batch_size") or self.step[0]
        tokens_per_step = blocks * (self.given.get("model.n_positions") or self.step[1])
        steps = tokens / tokens_per_step
        saves = max(VALIDATIONS, self.changes["training.minutes"] / MINUTES_BETWEEN_SAVES)
        values = recipe_values(self.architecture, size, steps, self.step, is_known_by_heart) | {
            "training.eval_every_steps": math.ceil(steps / (VALIDATIONS + 1)),
            "training.eval_max_tokens": round(min(max(VALIDATED_SHARE * tokens, FEWEST_VALIDATED), MOST_VALIDATED)),
            "training.save_every_steps": math.ceil(steps / (saves + 1)),
        }
        most = MOST_STEPS if most_tokens is None else min(max(1, round(most_tokens / tokens_per_step)), MOST_STEPS)
        return load_recipe(self.name, {**self.changes, "training.max_steps": most}, self._kept(values))

    def _kept(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values, without fields that the user has chosen."""
        left_out = []
        if self._has_tokenizer:
            left_out += ["tokenizer"]
        if self.given.get("model.layers") is not None:
            left_out += ["model.num_layers", "model.options"]
        if self.name is not None or self.given.get("optimizer.name") not in (None, values["optimizer.name"]):
            left_out += ["optimizer"]
        if self.name is not None:
            left_out += ["model.options", "model.config", "schedule.name"]
        return {field: value for field, value in values.items() if not field.startswith(tuple(left_out))}
