"""How rows differ from the best Transformer row at equal tokens, FLOPs and time, and what compute equals its score.

A run is validated several times; between two validations its score is interpolated linearly. Before a run ends, its
learning rate has not decayed fully, so an interpolated score is worse than the score of a run that ends there.
"""

import dataclasses
import math
import statistics
from collections.abc import Iterator, Sequence

import numpy as np

from multilin.analysis.compare.answers import (
    AXES,
    SMALLEST,
    UNITS,
    budget_text,
    chance_text,
    mean_text,
    of_steps,
    p_text,
    score_text,
)
from multilin.analysis.compare.record import TOLERANCE, Comparison, RowRecord, guesses, sign
from multilin.analysis.compare.statistics import LEVEL, Difference, pairwise, spread
from multilin.errors import listed, plural

EQUAL = {"tokens": "equal tokens", "flops": "equal training FLOPs", "seconds": "equal time"}
RATE = "optimizer.learning_rate"
CERTAINTY = {None: "cannot say", True: "noise", False: "sure"}
TRANSFORMERS = ("gpt2", "llama")


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A row compared with another row, the reference.

    at: the row's score minus the reference's at equal "tokens", "flops" and "seconds", in per cent of the reference's
        bits per byte, or in points of accuracy; None if one of them had no validation yet.
    compute: FLOPs with which the row reaches the reference's final score, divided by the reference's FLOPs; None if the
        row does not reach it.
    """

    row: str
    reference: str
    at: dict[str, Difference | None]
    compute: float | None


def is_transformer(row: RowRecord) -> bool:
    """Whether the row is GPT-2 or Llama."""
    return row.recipe["model"]["architecture"] in TRANSFORMERS and not row.recipe["model"]["layers"]


def headline(comparison: Comparison) -> Verdict | None:
    """The verdict on the best row that is no Transformer, against the best Transformer row, else the best other row.

    It is None if the rows are not ranked, or if there is only one.
    """
    if not comparison.is_ranked or len(comparison.order) < 2:
        return None
    best, second = comparison.order[:2]
    found = [verdict_on(comparison, name) for name in comparison.order]
    if not is_transformer(comparison.row(reference(comparison))):
        return verdict_on(comparison, best, second)
    own = (one for one in found if one is not None and not is_transformer(comparison.row(one.row)))
    return next(own, verdict_on(comparison, second, best))


def reference(comparison: Comparison) -> str:
    """The row with which other rows are compared: the best Transformer row, else the best row."""
    order = comparison.order
    return next((name for name in order if is_transformer(comparison.row(name))), order[0])


def verdict_on(comparison: Comparison, name: str, other: str | None = None) -> Verdict | None:
    """A row against the reference, or another row; None if the rows are the same, or not ranked, or if one failed."""
    if not comparison.is_ranked or name not in comparison.order:
        return None
    other = reference(comparison) if other is None else other
    if name == other:
        return None
    row, against, measure = comparison.row(name), comparison.row(other), comparison.measure
    level = mean_course(against, measure)[-1][measure]
    needed, usual = (cost_to_reach(one, level, "flops", measure) for one in (row, against))
    compute = None if needed is None or usual is None else needed / usual
    return Verdict(name, other, {axis: _at_equal(comparison, row, against, axis) for axis in AXES}, compute)


def _at_equal(comparison: Comparison, row: RowRecord, other: RowRecord, axis: str) -> Difference | None:
    """The difference of two rows when the first of them ends; p is corrected for all pairs of rows."""
    measure, pair = comparison.measure, (row, other)
    if axis in comparison.budget:
        found = next(d for d in comparison.differences if {d.one, d.other} == {row.name, other.name})
        assert other.score is not None
        return _seen_from(row.name, found, 100 if measure == "accuracy" else 100 / other.score.mean)
    when = min(mean_course(one, measure)[-1][axis] for one in pair)
    scores = {one.name: _scores_at(one, axis, when, measure) for one in pair}
    if not all(scores.values()):
        return None
    means = {
        name: spread(scores[name]) for name in sorted(scores, key=lambda n: sign(measure) * spread(scores[n]).mean)
    }
    guessing = [
        one.name for one in pair if guesses(one, means[one.name].mean, comparison.chance, len(comparison.order))
    ]
    (found,) = pairwise(means, measure, guessing)
    if found.p is not None:
        found = dataclasses.replace(found, p=min(1.0, found.p * comparison.num_tests))
    return _seen_from(row.name, found, 100 if measure == "accuracy" else 100 / means[other.name].mean)


def _seen_from(name: str, found: Difference, factor: float) -> Difference:
    """The difference times a factor, as the named row minus the other row."""
    if found.one != name:
        found = dataclasses.replace(found, one=found.other, other=found.one)
        factor = -factor
    ends = None if found.interval is None else sorted(factor * end for end in found.interval)
    interval = None if ends is None else (ends[0], ends[1])
    return dataclasses.replace(found, difference=factor * found.difference, share=None, interval=interval)


def _scores_at(row: RowRecord, axis: str, when: float, measure: str) -> list[float]:
    """The score of each seed after some tokens, FLOPs or seconds; empty before the first validation."""
    places = [point[axis] for point in mean_course(row, measure)]
    if when < places[0]:
        return []
    courses = ([getattr(point, measure) for point in run.course[: len(places)]] for run in row.finished)
    return [float(np.interp(when, places, course)) for course in courses]


def cost_to_reach(row: RowRecord, level: float, axis: str, measure: str) -> float | None:
    """The tokens, seconds or FLOPs after which the mean over the seeds first reached a level; None if it never did."""
    points = mean_course(row, measure)
    for before, point in zip([points[0], *points], points, strict=False):
        if sign(measure) * (point[measure] - level) <= 0:
            gap = before[measure] - point[measure]
            share = 1.0 if gap == 0 else (before[measure] - level) / gap
            return before[axis] + share * (point[axis] - before[axis])
    return None


def mean_course(row: RowRecord, measure: str) -> list[dict[str, float]]:
    """The means over the finished seeds at each validation, and the lowest and highest score of a seed."""
    course = []
    for points in zip(*(run.course for run in row.finished), strict=False):
        values = [float(getattr(point, measure)) for point in points]
        axes = {axis: statistics.fmean(getattr(point, axis) for point in points) for axis in AXES}
        course.append({**axes, measure: statistics.fmean(values), "low": min(values), "high": max(values)})
    return course


def verdict_cell(comparison: Comparison, row: RowRecord) -> str:
    """A row against the reference at the budget, such as `-2.1 % (-3.0 to -1.2): sure`."""
    if row.score is None:
        return "failed"
    found = verdict_on(comparison, row.name)
    text = "not ranked" if not comparison.is_ranked else "only row" if len(comparison.order) == 1 else "reference"
    if found is not None:
        text = gap_cell(comparison, found.at[next(iter(comparison.budget))])
    if row.name in comparison.at_chance:
        return "no better than chance" if found is None else f"{text}; no better than chance"
    return text


def gap_cell(comparison: Comparison, gap: Difference | None, *, is_short: bool = False) -> str:
    """A difference with its interval and certainty; the short text has no interval, and says only if it is noise."""
    if gap is None:
        return "no validation yet"
    size = f"{gap.difference:+.1f} {_percent(comparison)}"
    if is_short:
        return f"{size}, noise" if gap.within_noise else size
    interval = "" if gap.interval is None else " ({:+.1f} to {:+.1f})".format(*gap.interval)
    return f"{size}{interval}: {CERTAINTY[gap.within_noise]}"


def at_cell(comparison: Comparison, row: RowRecord, axis: str, *, is_short: bool = False) -> str:
    """A row against the reference at equal tokens, FLOPs or seconds."""
    found = verdict_on(comparison, row.name)
    return "" if found is None else gap_cell(comparison, found.at[axis], is_short=is_short)


def compute_cell(comparison: Comparison, row: RowRecord) -> str:
    """The compute for the reference's score as a multiple of the reference's, such as `x0.62`."""
    found = verdict_on(comparison, row.name)
    if found is None or found.reference in comparison.at_chance:
        return ""
    return "not reached" if found.compute is None else f"x{found.compute:.2f}"


def verdict_sentences(comparison: Comparison) -> str:
    """Two sentences: the best row that is no Transformer against the best Transformer; or why there is no verdict."""
    budget = budget_text(comparison)
    if not comparison.order:
        return "Every row failed."
    reasons = []
    if comparison.has_no_learner:
        reasons.append(
            f"No row has learned the task: with {budget} for each run, no row is above chance, "
            f"{chance_text(comparison)} of the answers right."
        )
    if comparison.off_budget:
        missed = [f"{name} used {budget_text(comparison, value)}" for name, value in comparison.off_budget.items()]
        hint = "; a budget in tokens does not depend on the machine" if "seconds" in comparison.budget else ""
        reasons.append(
            f"The rows are not ranked: each run had a budget of {budget}, but {listed(missed)}, which is more than "
            f"{TOLERANCE:.0%} off{hint}."
        )
    if reasons:
        return " ".join(reasons)
    if (found := headline(comparison)) is None:
        row = comparison.row(comparison.order[0])
        return f"{row.name} reaches {score_text(comparison, row)} {_unit(comparison)} with {budget}."
    return f"{_at_the_budget(comparison, found)} {_elsewhere(comparison, found)}"


def _at_the_budget(comparison: Comparison, found: Verdict) -> str:
    """The scores of two rows, their difference, its interval, and whether it is noise."""
    row, other = comparison.row(found.row), comparison.row(found.reference)
    gap = found.at[next(iter(comparison.budget))]
    assert row.score is not None
    assert other.score is not None
    assert gap is not None
    counts = sorted({row.score.count, other.score.count})
    details = "one seed" if counts == [1] else f"{listed(list(map(str, counts)))} seeds"
    if gap.interval is not None:
        way = -1 if gap.difference < 0 else 1  # the interval's direction is the word above or below
        low, high = sorted(way * end for end in gap.interval)
        details = f"95 % interval {low:.1f} to {high:.1f} {_percent(comparison)}, {details}"
    certainty = "cannot say whether this is noise" + (f" ({gap.unknown})" if gap.unknown and counts != [1] else "")
    if gap.p is not None:
        pairs = f", corrected for {comparison.num_tests} pairs" if comparison.num_tests > 1 else ""
        p = f"p {'' if gap.p < SMALLEST else '= '}{p_text(gap.p)}"
        certainty = f"{'noise' if gap.within_noise else 'sure'} ({p}{pairs})"
    size = _gap(comparison, gap) if gap.difference else "equal to"
    note = "" if is_transformer(other) else " (the best other row; the sweep has no Transformer)"
    return (
        f"{row.name} reaches {mean_text(comparison, row)} {_unit(comparison)}, {size} {other.name}'s "
        f"{mean_text(comparison, other)}{note}, after {budget_text(comparison)} each ({details}): {certainty}."
    )


def _elsewhere(comparison: Comparison, found: Verdict) -> str:
    """The difference of two rows at equal tokens, FLOPs or time (not the budget), and the compute for equal scores."""
    other = found.reference
    texts: list[str] = []
    for axis in (axis for axis in EQUAL if axis not in comparison.budget):
        gap = found.at[axis]
        text = "unknown (no validation yet)" if gap is None else _gap(comparison, gap)
        text += " (noise)" if gap is not None and gap.within_noise else ""
        texts.append(f"{EQUAL[axis]} {'' if texts else 'it is '}{text}")
    sentence = f"At {', at '.join(texts)}"
    if other in comparison.at_chance:
        return f"{sentence}."
    if found.compute is None:
        return f"{sentence}; it does not reach {other}'s score within this budget."
    return f"{sentence}; it reaches {other}'s score with {found.compute:.2f} times {other}'s compute."


def _gap(comparison: Comparison, gap: Difference) -> str:
    """The size of a difference, such as `2.1 % below`."""
    size, way = abs(gap.difference), "above" if gap.difference > 0 else "below"
    return f"{size:.{1 if size >= 0.1 else 3}f} {_percent(comparison)} {way}" if size else "equal"


def _percent(comparison: Comparison) -> str:
    return "points" if comparison.measure == "accuracy" else "%"


def _unit(comparison: Comparison) -> str:
    return UNITS[comparison.measure].replace("accuracy", "of the answers right")


def caveats(comparison: Comparison) -> Iterator[str]:
    """Sentences that qualify the verdict: on rows that may be as good, unequal tuning, and the accuracy of guessing."""
    if not comparison.is_ranked or len(comparison.order) < 2:
        return
    best, found = comparison.order[0], headline(comparison)
    said = {found.row, found.reference} if found else set()
    if noisy := [d.one for d in comparison.to_best if d.within_noise and {d.one, best} != said]:
        yield f"{_are(noisy)} within noise of {best}, which has the best mean (p > {LEVEL:g}, corrected for all pairs)."
    if sentence := _tuned_unlike(comparison):
        yield sentence
    if comparison.chance is not None:
        yield f"Chance is {chance_text(comparison)}."
    if comparison.at_chance:
        yield f"{_are(comparison.at_chance)} no better than chance."


def _are(names: Sequence[str]) -> str:
    return f"{listed(names)} {'is' if len(names) == 1 else 'are'}"


def _tuned_unlike(comparison: Comparison) -> str:
    """A warning if the learning rate was not tuned or rows had different numbers of trials; else empty."""
    rows = [comparison.row(name) for name in comparison.order]
    if not any(RATE in stage for stage in comparison.stages):
        rates = {row.recipe["optimizer"]["learning_rate"] for row in rows}
        has = (
            "all rows have the same rate" if len(rates) == 1 else "each row has the rate of its recipe or of the sweep"
        )
        return f"The learning rates were not tuned: {has}."
    if before := [row.name for row in rows if not row.tuning]:
        tuned = [
            f"{row.name} (learning rate {row.choice[RATE]:g} chosen from {plural(len(row.tuning), 'trial')}"
            f"{of_steps(comparison.trial_share)})"
            for row in rows
            if row.tuning
        ]
        return (
            f"Tuned here: {listed(tuned)}; {listed(before)} kept the rates of the built-in sweep or of their recipes."
        )
    # Trials of values beyond those of the sweep are not counted: every row gets them by the same rule.
    most = math.prod(map(len, comparison.stages[0].values())) if len(comparison.stages) == 1 else math.inf
    trials = {row.name: min(len(row.tuning), most) for row in rows}
    if len(set(trials.values())) == 1:
        return ""
    return f"The rows were not tuned equally: {listed([f'{name} had {n} trials' for name, n in trials.items()])}."
