"""From a text and minutes to a recipe: measure, pick, and say what to expect."""

import dataclasses
import functools
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

from multilin.analysis.budget.law import Law, by_heart, shipped_law
from multilin.analysis.budget.measure import TextMeasure, candidate, count_bytes, measure_speed, measure_text
from multilin.analysis.budget.rule import (
    ARCHITECTURE,
    BYTES_PER_TOKEN,
    LONG_RUN,
    LONG_TOKENS,
    SHORT_RUN,
    SMALLEST_VOCABULARY,
    Candidate,
    Choice,
    Size,
    choose,
    choose_vocabulary,
    recipe_values,
    sizes,
    with_vocabulary,
)
from multilin.analysis.plan import find_vocab_size
from multilin.data.settings import BYTE_VOCAB_SIZE
from multilin.data.tasks import is_task
from multilin.data.tokenizers import VocabularyTooLarge
from multilin.errors import InputError
from multilin.model.memory import available_memory
from multilin.settings.bounds import MOST_STEPS
from multilin.training.assemble import check_model, read_text
from multilin.training.environment import num_processes
from multilin.training.progress import TrainingProgress
from multilin.training.recipe import Recipe, given_fields, load_recipe
from multilin.training.resolve import resolve_recipe
from multilin.training.time_limit import ENDING, FIRST_SAVE

MEASURING_SHARE = 0.5  # of the whole time, after which the machine is measured no more
TRAINING_SHARE = 0.9  # of the time that is left when the text is ready; the rest validates, saves, loads batches
PROBE_WIDTHS = 64, 256  # of the two models whose speeds are measured
VALIDATIONS = 4  # before the last one
VALIDATED_SHARE, FEWEST_VALIDATED, MOST_VALIDATED = 0.05, 10_000, 100_000  # tokens, as a share of those of training
MINUTES_BETWEEN_SAVES = 3  # at most
START_AND_END = 10.0  # seconds of a run before its first step and after its last one, at least


@dataclasses.dataclass(frozen=True)
class Pick:
    """A recipe for so many minutes, and what it follows from.

    recipe: ready to be trained; it ends after the minutes, or after the most passes that the law gains from.
    text: measured. choice: of the rule. tokens_per_second: of it on this machine, as measured.
    expected: bits per byte. spread: twice the error of the law, in bits per byte.
    """

    recipe: Recipe
    text: TextMeasure
    choice: Choice
    tokens_per_second: float
    expected: float
    spread: float
    remarks: list[str]

    @property
    def with_steps(self) -> Recipe:
        """The recipe with about the steps that fit, instead of the minutes."""
        training = self.recipe.training
        blocks = training.global_batch_size or training.batch_size
        steps = max(1, round(self.choice.tokens / (blocks * self.recipe.model.n_positions)))
        return dataclasses.replace(self.recipe, training=dataclasses.replace(training, minutes=None, max_steps=steps))


def pick(
    name: str | None, changes: Mapping[str, Any], minutes: float, began: float, progress: TrainingProgress
) -> Pick:
    """Pick what neither a recipe nor changes of it give.

    Args:
        name: a recipe to keep, or None.
        changes: dotted fields of the recipe to keep, to their values.
        minutes: that the whole command may take.
        began: `time.monotonic()` when it began.
        progress: told what is under way.

    Raises:
        InputError: a recipe or a text that cannot be used, fields that the clock or the rule decides, too little time.
    """
    picker = _Picker(name, {"training.minutes": minutes, **changes})
    picker.check()
    law, given = shipped_law(), picker.given_vocabulary()
    vocab_size, train_bytes = given or SMALLEST_VOCABULARY, count_bytes(picker.base.data) if given is None else 0
    progress.message("measuring this machine and the text")
    until = began + MEASURING_SHARE * 60 * minutes
    speed = measure_speed(*picker.probes(vocab_size), until)
    _time_left(minutes, began)
    if given is None:
        vocab_size = choose_vocabulary(
            picker.candidates, law, speed=speed, seconds=TRAINING_SHARE * 60 * minutes, train_bytes=train_bytes
        )  # fmt: skip
        if picker.given.get("tokenizer.kind") is not None:
            vocab_size = max(vocab_size, SMALLEST_VOCABULARY)
    try:
        text = measure_text(read_text(picker.probes(vocab_size)[0][0], progress.prepare))
    except VocabularyTooLarge as error:
        if given is not None or (picker.given.get("tokenizer.kind") is not None and error.most <= BYTE_VOCAB_SIZE):
            raise
        vocab_size = picker.vocabulary_of_at_most(error.most)
        text = measure_text(read_text(picker.probes(vocab_size)[0][0], progress.prepare))
    left = _time_left(minutes, began)
    choose_now = functools.partial(
        choose, law=law, seconds=_training_seconds(minutes, left), train_tokens=text.train_tokens,
        train_bytes=text.train_bytes, repetition=text.repetition, memory=available_memory(),
    )  # fmt: skip
    choice = choose_now(picker.candidates(vocab_size), speed=speed)
    if choice.tokens >= LONG_TOKENS:
        picker.step = LONG_RUN
        if time.monotonic() < until:
            speed = measure_speed(*picker.probes(vocab_size), until)
        choice = choose_now(picker.candidates(vocab_size), speed=speed)
    tokens_per_second = speed.tokens_per_second(choice.candidate)
    most_tokens = choose_now([choice.candidate], speed=speed, seconds=math.inf).tokens
    needed = 60 * minutes - left + choice.tokens / tokens_per_second / TRAINING_SHARE + START_AND_END
    ends_after = min(needed / 60, minutes) if choice.tokens == most_tokens else None
    architecture = picker.architecture
    remarks = list(_remarks(law, text, architecture, choice, ends_after))
    expected = law.predict(architecture, text.trigram, choice.ratio)
    known = by_heart(choice.candidate.parameters, text.train_bytes, choice.tokens / text.train_tokens)
    recipe = picker.recipe(choice.candidate.size, choice.tokens, known, most_tokens)
    return Pick(recipe, text, choice, tokens_per_second, expected, 2 * law.error * expected, remarks)


def _remarks(law: Law, text: TextMeasure, architecture: str, choice: Choice, ends_after: float | None) -> Iterator[str]:
    """Why a run ends after so many minutes, if before its time, and what the expectation lacks, a sentence each."""
    if ends_after is not None:
        yield (
            f"More than {choice.tokens / text.train_tokens:.2g} passes over this text would overfit: the run "
            f"ends after them, in about {ends_after:.1f} minutes. More text would be worth more time."
        )
    flops = choice.tokens * choice.candidate.flops_per_token
    if flops > law.most_flops:
        yield (
            f"The expectation goes beyond the measured runs, of which the largest had {law.most_flops:.1e} operations; "
            f"this one has {flops:.1e}."
        )
    if choice.tokens < law.fewest_tokens:
        yield (
            f"The expectation is a guess: this run reads {choice.tokens / 1e6:.2f} M tokens, and no measured run fewer "
            f"than {law.fewest_tokens / 1e6:.2f} M."
        )
    if architecture not in (law.main, *law.factors):
        yield f"No measured run has the architecture {architecture}; expected is what {law.main} would reach."


def _training_seconds(minutes: float, left: float) -> float:
    """Seconds that remain for steps.

    Raises:
        InputError: there are none beside what the clock of a run keeps back for its end.
    """
    seconds = min(TRAINING_SHARE * left, left - ENDING - 2 * FIRST_SAVE)
    if seconds <= 0:
        raise InputError(f"--minutes: {minutes:g} given, but reading and measuring left {left:.0f} s; give more")
    return seconds


def _time_left(minutes: float, began: float) -> float:
    """Seconds that are left of the minutes.

    Raises:
        InputError: so few that hardly a step could be made.
    """
    used = time.monotonic() - began
    if (left := 60 * minutes - used) <= used / 10:
        raise InputError(f"--minutes: {minutes:g} given, but reading and measuring took {used:.0f} s so far; give more")
    return left


class _Picker:
    """What is given, and recipes that complete it."""

    def __init__(self, name: str | None, changes: Mapping[str, Any]) -> None:
        self.name, self.changes, self.given = name, changes, given_fields(name, changes)
        self.base = load_recipe(name, changes)
        self.architecture = self.given.get("model.architecture") or ARCHITECTURE
        self.step = SHORT_RUN
        self._counted: dict[tuple[int, int], list[Candidate]] = {}

    def check(self) -> None:
        """Refuse what the rule cannot complete."""
        minutes = "--minutes picks a model for a text"
        if num_processes() > 1:
            raise InputError(f"{minutes} by one process; give torchrun a recipe, with --training.minutes")
        if is_task(self.base.data.name):
            raise InputError(f"data.source: {self.base.data.name} is a task, but {minutes}; give --training.minutes")
        if self.base.model.start is not None:
            raise InputError(f"model.start: {self.base.model.start} given, but {minutes}; give --training.minutes")
        smallest, *_ = sizes(self.given_vocabulary() or SMALLEST_VOCABULARY, self.given)
        check_model(resolve_recipe(self.recipe(smallest)))

    def given_vocabulary(self) -> int | None:
        """The entries of the given tokenizer; None where one is to be chosen."""
        return find_vocab_size(self.base) if self._has_tokenizer() else self.base.tokenizer.vocab_size

    def vocabulary_of_at_most(self, most: int) -> int:
        """The largest vocabulary of the rule that a text supports; bytes if there is none, and bytes are allowed."""
        smallest = BYTE_VOCAB_SIZE if self.given.get("tokenizer.kind") is None else most
        return max((size for size in BYTES_PER_TOKEN if size <= most), default=smallest)

    def _has_tokenizer(self) -> bool:
        data, tokenizer = self.base.data, self.base.tokenizer
        return data.is_prepared or tokenizer.path is not None or tokenizer.kind == "byte"

    def probes(self, vocab_size: int) -> tuple[tuple[Recipe, Size], tuple[Recipe, Size]]:
        """Recipes and sizes of the two models whose speeds are measured, the smaller first."""
        found = sizes(vocab_size, self.given)
        small, large = (min(found, key=lambda size: abs(size.hidden_size - width)) for width in PROBE_WIDTHS)
        return (self.recipe(small), small), (self.recipe(large), large)

    def candidates(self, vocab_size: int) -> Iterator[Candidate]:
        """The models that may be picked, the smallest first; each is counted when it is first asked for."""
        known = self._counted.setdefault(self.step, [])
        for place, size in enumerate(sizes(vocab_size, self.given)):
            if place == len(known):
                known.append(candidate(self.recipe(size), size))
            yield with_vocabulary(known[place], vocab_size)

    def recipe(self, size: Size, tokens: int = 10**6, known: float = 0.0, most_tokens: int | None = None) -> Recipe:
        """The recipe of a size, for about so many tokens, known by heart so far (x of the law).

        It ends after `most_tokens`, unless the minutes end it before.
        """
        blocks = self.given.get("training.global_batch_size") or self.given.get("training.batch_size") or self.step[0]
        tokens_per_step = blocks * (self.given.get("model.n_positions") or self.step[1])
        steps = tokens / tokens_per_step
        saves = max(VALIDATIONS, self.changes["training.minutes"] / MINUTES_BETWEEN_SAVES)
        values = recipe_values(self.architecture, size, steps, self.step, known) | {
            "training.eval_every_steps": math.ceil(steps / (VALIDATIONS + 1)),
            "training.eval_max_tokens": round(min(max(VALIDATED_SHARE * tokens, FEWEST_VALIDATED), MOST_VALIDATED)),
            "training.save_every_steps": math.ceil(steps / (saves + 1)),
        }
        most = MOST_STEPS if most_tokens is None else min(max(1, round(most_tokens / tokens_per_step)), MOST_STEPS)
        return load_recipe(self.name, {**self.changes, "training.max_steps": most}, self._kept(values))

    def _kept(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values of fields that what is given leaves open."""
        left_out = []
        if self._has_tokenizer():
            left_out += ["tokenizer"]
        if self.given.get("model.layers") is not None:
            left_out += ["model.num_layers", "model.options"]
        if self.name is not None or self.given.get("optimizer.name") not in (None, values["optimizer.name"]):
            left_out += ["optimizer"]
        if self.name is not None:
            left_out += ["model.options", "model.config", "schedule.name"]
        return {field: value for field, value in values.items() if not field.startswith(tuple(left_out))}
