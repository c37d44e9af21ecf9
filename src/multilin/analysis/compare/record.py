"""The result of a comparison as plain data for comparison.json, read from the folders of its runs."""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from multilin.analysis.compare.rows import Choice, Plan
from multilin.analysis.compare.statistics import Difference, Spread, is_above_chance, pairwise, spread
from multilin.data.tasks import is_task, task_text
from multilin.errors import InputError, plural
from multilin.runs.files import ADAPTER_WEIGHTS
from multilin.settings.inputs import read_json
from multilin.training.run_folder import RunFolder

FINISHED, FAILED = "finished", "failed"
# The files of a model that are written last.
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", ADAPTER_WEIGHTS)
NOT_FINITE = "the loss on the validation text after the last step is not finite"
TOLERANCE = 0.1  # share of the budget by which a row may miss it and still be ranked


@dataclasses.dataclass(frozen=True)
class Point:
    """A validation during a run.

    seconds: seconds of training so far, without validations and checkpoints. The steps before the first line of
        metrics.jsonl include the warm-up; their seconds are computed from the median speed.
    flops: floating-point operations for the tokens so far.
    """

    step: int
    tokens: int
    seconds: float
    flops: float
    loss: float
    bits_per_byte: float | None = None
    accuracy: float | None = None


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """One run: a row with a seed and one choice of the tuned values.

    failure: the error that ended the run; None if it finished.
    final: the score after the last step on validation documents that tuning did not use; None if there are none.
    tokens_per_second: median over the lines of metrics.jsonl, without the first, which includes the warm-up.
    """

    seed: int
    folder: str
    choice: dict[str, Any]
    status: str
    failure: str | None = None
    tokens_per_second: float | None = None
    course: list[Point] = dataclasses.field(default_factory=list)
    final: Point | None = None

    @property
    def last(self) -> Point:
        """The validation after the last step."""
        return self.course[-1]

    @property
    def result(self) -> Point:
        """The reported score: the final score if there is one, else the score of the last validation."""
        return self.final or self.last


@dataclasses.dataclass(frozen=True)
class Decoding:
    """Generation after `context` tokens: the tokens per second, and the bytes of the state after the context."""

    context: int
    tokens_per_second: float
    state_bytes: int


@dataclasses.dataclass(frozen=True)
class RowRecord:
    """One model of the comparison; figures that need a finished run are None if all runs failed.

    flops_per_token: training FLOPs per token. choice: the values of the tuned fields that were best on the first seed.
    tuning: the runs that decided the choice. runs: one for each seed. score: mean and spread of the finished runs.
    answers: number of answers that a validation on a task scores; None on a text.
    colour: number of the row's colour in the report; it does not depend on the rank.
    memory: bytes of the trained model's state after a sequence of its training length.
    """

    name: str
    status: str
    parameters: int
    embedding_parameters: int
    flops_per_token: float
    max_steps: int
    tokens_per_step: int
    recipe: dict[str, Any]
    choice: dict[str, Any]
    tuning: list[RunRecord]
    runs: list[RunRecord]
    score: Spread | None
    seconds: float | None
    tokens_per_second: float | None
    remarks: list[str]
    answers: int | None = None
    colour: int = 0
    decoding: list[Decoding] = dataclasses.field(default_factory=list)
    memory: int | None = None
    sample: str | None = None

    @property
    def finished(self) -> list[RunRecord]:
        """The runs that have a score."""
        return [run for run in self.runs if run.status == FINISHED]

    @property
    def all_runs(self) -> list[RunRecord]:
        """The runs of tuning, then the runs of the seeds; a run that belongs to both appears once."""
        scored = {run.folder: run for run in self.runs}
        return list({run.folder: scored.get(run.folder, run) for run in [*self.tuning, *self.runs]}.values())

    def used(self, kind: str) -> float:
        """The tokens, FLOPs or seconds of training that a finished run used; seconds are the mean over the runs."""
        tokens = self.max_steps * self.tokens_per_step
        return {"tokens": tokens, "flops": tokens * self.flops_per_token, "seconds": self.seconds or 0.0}[kind]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The result of a comparison: its rows, their order, and which differences are more than noise.

    measure: the unit of `score`: "bits_per_byte" or "accuracy".
    one_tokenizer: whether all rows were trained on the same tokens, so that losses per token can be compared too.
    chance: accuracy of the best guesses that can be made without reading the sequence; None on a text.
    at_chance: finished rows that are no better than chance. If all rows are, the rows are not ranked.
    off_budget: rows whose runs missed the budget by more than the share TOLERANCE, and the mean amount that they used.
        If there are such rows, no row is ranked.
    order: finished rows, the best first; in the order of the sweep if they are not ranked.
    differences: the difference between every row and every better row; empty if the rows are not ranked.
    """

    title: str
    measure: str
    budget: dict[str, float]
    seeds: list[int]
    stages: list[dict[str, list[Any]]]
    trial_share: float
    final_half: bool
    task: str | None
    one_tokenizer: bool
    prompt: str
    rows: list[RowRecord]
    chance: float | None
    at_chance: list[str]
    off_budget: dict[str, float]
    order: list[str]
    differences: list[Difference]
    remarks: list[str]
    machine: dict[str, Any]

    @property
    def is_ranked(self) -> bool:
        """Whether the rows can be ranked: all rows kept to the budget, and at least one is better than chance."""
        return not self.off_budget and not self.has_no_learner

    @property
    def has_no_learner(self) -> bool:
        """Whether no finished row is better than chance."""
        return bool(self.order) and len(self.at_chance) == len(self.order)

    @property
    def best(self) -> list[str]:
        """The best row, and all rows that are not known to be worse; empty if the rows are not ranked."""
        if not self.is_ranked or not self.order:
            return []
        return [self.order[0], *(d.one for d in self.to_best if d.within_noise is not False)]

    @property
    def to_best(self) -> list[Difference]:
        """The differences between the best row and every other row."""
        return [difference for difference in self.differences if difference.other == self.order[0]]

    @property
    def ordered(self) -> list[RowRecord]:
        """The finished rows in `order`, then the failed rows."""
        return [*map(self.row, self.order), *(row for row in self.rows if row.score is None)]

    @property
    def num_tests(self) -> int:
        """The number of pairs of rows that were tested."""
        return sum(difference.p is not None for difference in self.differences)

    def row(self, name: str) -> RowRecord:
        """The row of this name."""
        return next(row for row in self.rows if row.name == name)


def read_run(plan: Plan, folder: Path, seed: int, failure: str | None) -> RunRecord:
    """Read the record of a run from its metrics.jsonl."""
    try:
        lines = RunFolder(folder).read_metrics()
    except InputError:
        if failure is None:
            raise
        lines = []
    speeds = [line["tokens_per_second"] for line in lines[1:] or lines]
    median = statistics.median(speeds) if speeds else None
    seconds, tokens, course = 0.0, 0, []
    for number, line in enumerate(lines):
        # The time of the first line may include the compilation of kernels, which is needed once per machine.
        seconds += (line["tokens"] - tokens) / (line["tokens_per_second"] if number else median)
        tokens = line["tokens"]
        if math.isfinite(line.get("validation_loss", math.nan)):
            scores: list[Any] = [line.get(f"validation_{name}") for name in ("loss", "bits_per_byte", "accuracy")]
            course.append(Point(line["step"], tokens, round(seconds, 3), tokens * plan.flops_per_token, *scores))
    if failure is None and (not course or course[-1].step < lines[-1]["step"]):
        failure = NOT_FINITE
    return RunRecord(seed, folder.name, dict(plan.choice), FAILED if failure else FINISHED, failure, median, course)


def validation_remarks(rows: Sequence[RowRecord], output: Path) -> list[str]:
    """One sentence for each different validation text of the finished runs in a comparison's folder."""
    texts = (read_json(RunFolder(output / run.folder).data, "run") for row in rows for run in row.finished[:1])
    found = dict.fromkeys(text["validation"].get("summary") for text in texts)
    return [f"Validation text: {summary}." for summary in found if summary]


def is_finished(folder: Path, max_steps: int) -> bool:
    """Whether a run has taken its last step and saved its model."""
    try:
        lines = RunFolder(folder).read_metrics()
    except InputError:  # the run is resumed, which rewrites the file
        return False
    return bool(lines) and lines[-1]["step"] >= max_steps and any((folder / name).is_file() for name in _WEIGHTS)


def make_row(
    plan: Plan, recipe: dict[str, Any], runs: list[RunRecord], tuning: list[RunRecord], measure: str, colour: int
) -> RowRecord:
    """Make the record of a row from the records of its runs."""
    finished = [run for run in runs if run.status == FINISHED]
    remarks = list(plan.remarks)
    if failures := dict.fromkeys(run.failure for run in runs if run.failure):
        number = len(runs) - len(finished)
        remarks.append(f"{number} of {plural(len(runs), 'run')} failed: {'; '.join(map(str, failures))}")
    return RowRecord(
        name=plan.row.name, status=FINISHED if finished else FAILED, parameters=plan.parameters,
        embedding_parameters=plan.embedding_parameters, flops_per_token=plan.flops_per_token,
        max_steps=plan.recipe.training.num_steps, tokens_per_step=plan.tokens_per_step, recipe=recipe,
        choice=dict(plan.choice), tuning=tuning, runs=runs,
        score=spread([score_of(run, measure) for run in finished]) if finished else None,
        seconds=statistics.fmean(run.last.seconds for run in finished) if finished else None,
        tokens_per_second=statistics.median(run.tokens_per_second or 0.0 for run in finished) if finished else None,
        remarks=remarks, answers=_num_answers(plan), colour=colour,
    )  # fmt: skip


def _num_answers(plan: Plan) -> int | None:
    """The number of answers that a validation on a task scores; None on a text."""
    recipe = plan.recipe
    if not is_task(recipe.data.name):
        return None
    validation = task_text(recipe.data.name).validation
    return validation.num_answers(recipe.model.n_positions, recipe.training.eval_max_tokens)


def score_of(run: RunRecord, measure: str) -> float:
    """The reported score of a finished run."""
    return float(getattr(run.result, measure))


def sign(measure: str) -> int:
    """1 if a lower score is better, -1 if a higher score is better."""
    return -1 if measure == "accuracy" else 1


def best_choice(tuning: Sequence[RunRecord], measure: str) -> Choice:
    """The values of the run with the best last validation; the first run's values if every run failed."""
    finished = [run for run in tuning if run.status == FINISHED]
    return min(finished, key=lambda run: sign(measure) * getattr(run.last, measure), default=tuning[0]).choice


def further_choice(tuning: Sequence[RunRecord], measure: str) -> dict[str, float] | None:
    """The next value to try beyond the best one, if the best is the lowest or highest tried; else None.

    Its ratio to the best value is the ratio of the best value to its neighbour. Integers are rounded.

    Args:
        tuning: runs, also failed ones, with positive values of one field. If all values are equal, the result is None.
        measure: the measure by which the runs are judged.
    """
    best = best_choice(tuning, measure)
    (name,) = best
    tried = sorted({float(run.choice[name]) for run in tuning})
    end = float(best[name])
    if len(tried) < 2 or end not in (tried[0], tried[-1]) or all(run.status != FINISHED for run in tuning):
        return None
    neighbour = tried[1] if end == tried[0] else tried[-2]
    further = end * end / neighbour
    return {name: round(further) if isinstance(best[name], int) and further >= 1 else float(f"{further:.6g}")}


class Ranking(NamedTuple):
    """The fields of a Comparison that are computed from the scores of its rows."""

    at_chance: list[str]
    off_budget: dict[str, float]
    order: list[str]
    differences: list[Difference]


def ranking(rows: Sequence[RowRecord], measure: str, budget: Mapping[str, float], chance: float | None) -> Ranking:
    """Find the rows at chance and off the budget, the order of the finished rows, and their differences."""
    ((kind, amount),) = budget.items()
    finished = [row for row in rows if row.score is not None]
    scores = {row.name: row.score for row in finished if row.score is not None}
    at_chance = [row.name for row in finished if guesses(row, scores[row.name].mean, chance, len(finished))]
    spent = {row.name: row.used(kind) for row in finished}
    off_budget = {name: value for name, value in spent.items() if abs(value - amount) > TOLERANCE * amount}
    if kind == "tokens" and len(set(spent.values())) == 1:  # one more step would exceed the budget
        off_budget = {}
    if off_budget or len(at_chance) == len(finished):
        return Ranking(at_chance, off_budget, list(scores), [])
    order = sorted(scores, key=lambda name: sign(measure) * scores[name].mean)
    differences = pairwise({name: scores[name] for name in order}, measure, at_chance)
    return Ranking(at_chance, off_budget, order, differences)


def guesses(row: RowRecord, accuracy: float, chance: float | None, num_rows: int) -> bool:
    """Whether a row's accuracy on a task is no better than chance, tested as one of `num_rows`; False on a text."""
    return chance is not None and not is_above_chance(accuracy, chance, row.answers or 0, num_rows)
