"""From a text and minutes to a recipe: measure, pick, and say what to expect."""

import dataclasses
import time
from collections.abc import Iterator, Mapping
from typing import Any

from multilin.analysis.budget.law import shipped_law
from multilin.analysis.budget.measure import TextMeasure, candidate, count_bytes, measure_speed, measure_text
from multilin.analysis.budget.rule import (
    ARCHITECTURE,
    BATCH_SIZE,
    MOST_PASSES,
    N_POSITIONS,
    SMALLEST_VOCABULARY,
    Candidate,
    Choice,
    Size,
    choose,
    choose_vocabulary,
    recipe_values,
    sizes,
)
from multilin.analysis.plan import find_vocab_size
from multilin.data.prepared import is_prepared
from multilin.data.task_text import is_task
from multilin.errors import InputError
from multilin.model.memory import available_memory
from multilin.training.assemble import read_text
from multilin.training.processes import num_processes
from multilin.training.progress import TrainingProgress
from multilin.training.recipe import Recipe, given_fields, load_recipe

TRAINING_SHARE = 0.9  # of the time that is left when the text is ready; the rest validates, saves, loads batches
PROBE_WIDTH = 128  # of the model whose speed is measured
VALIDATIONS = 4  # before the last one
VALIDATED_SHARE, FEWEST_VALIDATED, MOST_VALIDATED = 0.05, 10_000, 100_000  # tokens, as a share of those of training
MINUTES_BETWEEN_SAVES = 3  # at most


@dataclasses.dataclass(frozen=True)
class Pick:
    """A recipe for so many minutes, and what it follows from.

    recipe: ready to be trained; its `training.minutes` are fewer than asked for where `remarks` say so.
    text: measured. flops_per_second: of this machine in training, measured. choice: of the rule.
    expected: bits per byte. spread: twice the error of the law, in bits per byte.
    """

    recipe: Recipe
    text: TextMeasure
    flops_per_second: float
    choice: Choice
    expected: float
    spread: float
    remarks: list[str]


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
    progress.message("measuring this machine and the text")
    law, vocab_size = shipped_law(), picker.given_vocabulary() or SMALLEST_VOCABULARY
    probe = min(picker.sizes(vocab_size), key=lambda size: abs(size.hidden_size - PROBE_WIDTH))
    speed = measure_speed(picker.recipe(probe), probe)
    if picker.given_vocabulary() is None:
        flops = speed * TRAINING_SHARE * 60 * minutes
        train_bytes = count_bytes(picker.base.data)
        vocab_size = choose_vocabulary([*picker.candidates(vocab_size)], law, flops=flops, train_bytes=train_bytes)
        if picker.given.get("tokenizer.kind") is not None:
            vocab_size = max(vocab_size, SMALLEST_VOCABULARY)
        probe = dataclasses.replace(probe, vocab_size=vocab_size)
    text = measure_text(read_text(picker.recipe(probe), progress.prepare))
    used = time.monotonic() - began
    if (left := 60 * minutes - used) <= used / 10:
        raise InputError(
            f"--minutes: {minutes:g} given, but reading and measuring the text took {used:.0f} s; give more"
        )
    choice = choose(
        picker.candidates(vocab_size), law, flops=speed * TRAINING_SHARE * left, train_tokens=text.train_tokens,
        train_bytes=text.train_bytes, memory=available_memory(),
    )  # fmt: skip
    remarks, flops = [], choice.tokens * choice.candidate.flops_per_token
    if choice.tokens >= MOST_PASSES * text.train_tokens:
        minutes = min(minutes, (used + flops / speed / TRAINING_SHARE) / 60)
        remarks.append(
            f"More than {MOST_PASSES} passes over this text would learn it by heart: the run ends after {minutes:.1f} "
            "minutes. More text would be worth more time."
        )
    if flops > law.most_flops:
        remarks.append(
            f"The expectation goes beyond the measured runs, of which the largest had {law.most_flops:.1e} operations; "
            f"this one has {flops:.1e}."
        )
    architecture = picker.architecture
    if architecture not in (law.main, *law.factors):
        remarks.append(f"No measured run has the architecture {architecture}; expected is what {law.main} would reach.")
    expected = law.predict(architecture, text.trigram, choice.ratio)
    recipe = picker.recipe(choice.candidate.size, choice.tokens, {"training.minutes": minutes})
    return Pick(recipe, text, speed, choice, expected, 2 * law.error * expected, remarks)


class _Picker:
    """What is given, and recipes that complete it."""

    def __init__(self, name: str | None, changes: Mapping[str, Any]) -> None:
        self.name, self.changes, self.given = name, changes, given_fields(name, changes)
        self.base = load_recipe(name, changes)
        self.architecture = self.given.get("model.architecture") or ARCHITECTURE

    def check(self) -> None:
        """Refuse what the rule cannot complete."""
        minutes = "--minutes picks a model for a text"
        if num_processes() > 1:
            raise InputError(f"{minutes} by one process; give torchrun a recipe, with --training.minutes")
        if is_task(self.base.data.name):
            raise InputError(f"data.source: {self.base.data.name} is a task, but {minutes}; give --training.minutes")
        if self.base.model.start is not None:
            raise InputError(f"model.start: {self.base.model.start} given, but {minutes}; give --training.minutes")

    def given_vocabulary(self) -> int | None:
        """The entries of the given tokenizer; None where one is to be chosen."""
        return find_vocab_size(self.base) if self._has_tokenizer() else self.base.tokenizer.vocab_size

    def _has_tokenizer(self) -> bool:
        data, tokenizer = self.base.data, self.base.tokenizer
        return (
            data.mix is not None or is_prepared(data.source) or tokenizer.path is not None or tokenizer.kind == "byte"
        )

    def sizes(self, vocab_size: int) -> list[Size]:
        """Those that may be picked."""
        return sizes(vocab_size, self.given)

    def candidates(self, vocab_size: int) -> Iterator[Candidate]:
        """The models that may be picked, the smallest first."""
        for size in self.sizes(vocab_size):
            yield candidate(self.recipe(size), size)

    def recipe(self, size: Size, tokens: int = 10**6, decided: Mapping[str, Any] | None = None) -> Recipe:
        """The recipe of a size, for about so many tokens."""
        blocks = self.given.get("training.global_batch_size") or self.given.get("training.batch_size") or BATCH_SIZE
        steps = tokens / (blocks * (self.given.get("model.n_positions") or N_POSITIONS))
        saves = max(VALIDATIONS, self.changes["training.minutes"] / MINUTES_BETWEEN_SAVES)
        values = recipe_values(self.architecture, size, steps) | {
            "training.eval_every_steps": max(1, round(steps / (VALIDATIONS + 1))),
            "training.eval_max_tokens": round(min(max(VALIDATED_SHARE * tokens, FEWEST_VALIDATED), MOST_VALIDATED)),
            "training.save_every_steps": max(1, round(steps / (saves + 1))),
        }
        return load_recipe(self.name, {**self.changes, **(decided or {})}, self._kept(values))

    def _kept(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Those values that fit to what is given."""
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
