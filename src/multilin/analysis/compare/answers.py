"""The three questions of a comparison, each answered in a sentence that its figures give."""

import dataclasses
import statistics
from collections.abc import Sequence

from multilin.analysis.compare.record import TOLERANCE, Comparison, RowRecord, sign
from multilin.analysis.compare.statistics import LEVEL
from multilin.analysis.compare.words import UNITS, amount, budget_text, bytes_text, score_text

AXES = {"tokens": "training tokens", "seconds": "seconds of training", "flops": "FLOPs"}


@dataclasses.dataclass(frozen=True)
class Reached:
    """What a row spent until it first was as good as `level`."""

    row: str
    tokens: float
    seconds: float
    flops: float


def best_sentence(comparison: Comparison) -> str:
    """Which row is best at the budget, and which ones cannot be told from it."""
    if not comparison.order:
        return "Every row failed."
    if not comparison.is_ranked:
        missed = [f"{name} used {budget_text(comparison, value)}" for name, value in comparison.off_budget.items()]
        hint = "; a budget of tokens does not depend on the machine" if "seconds" in comparison.budget else ""
        return (
            f"Nothing is said about which row is best: each run had a budget of {budget_text(comparison)}, but "
            f"{listed(missed)}, more than {TOLERANCE:.0%} off{hint}."
        )
    best = comparison.row(comparison.order[0])
    assert best.score is not None
    unit, seeds = UNITS[comparison.measure], best.score.count
    figures = f"{score_text(comparison, best)} {unit}".replace("% accuracy", "% of the answers right")
    meaning = f"mean ± standard deviation of {seeds} seeds" if seeds > 1 else "one seed"
    sentence = f"{best.name} is best with {budget_text(comparison)} for each run: {figures} ({meaning})"
    if len(comparison.order) == 1:
        return f"{sentence}."
    found = [d for name in comparison.order[1:] if (d := comparison.difference_to_best(name))]
    silent, close = [d.one for d in found if d.p is None], [d.one for d in found if d.within_noise]
    if silent:
        return f"{sentence}. {listed(silent)} may differ from it by chance alone: one seed says nothing about that."
    if close:
        return f"{sentence}; {listed(close)} {'is' if len(close) == 1 else 'are'} within noise of it (p > {LEVEL:g})."
    return f"{sentence}; the differences to all others are larger than noise."


def speed_sentence(comparison: Comparison) -> str:
    """Who needs least to become as good as the worst row in the end."""
    if len(comparison.order) < 2:
        return "There are not two rows whose courses could be compared."
    rows = [comparison.row(name) for name in comparison.order]
    worst = max(rows, key=lambda row: sign(comparison.measure) * row.score.mean if row.score else 0.0)
    assert worst.score is not None
    level = worst.score.mean
    found = {row.name: reached(row, level, comparison.measure) for row in rows}
    needs: dict[str, list[str]] = {}
    for axis, name in AXES.items():
        least = min(found.values(), key=lambda r: getattr(r, axis))
        spent, usual = getattr(least, axis), getattr(found[worst.name], axis)
        few = "least" if axis == "seconds" else "fewest"
        needs.setdefault(least.row, []).append(f"the {few} {name} ({amount(spent)} instead of {amount(usual)})")
    parts = [f"{name} needs {listed(things)}" for name, things in needs.items()]
    unit = UNITS[comparison.measure]
    where = f"{score_text(comparison, worst).split(' ')[0]}{' %' if unit == 'accuracy' else ''} {unit}"
    return f"To reach {where}, where {worst.name} ends, {'; '.join(parts)}."


def cost_sentence(comparison: Comparison) -> str:
    """Who writes fastest and keeps least after the longest text."""
    rows = [row for row in comparison.rows if row.decoding]
    if not rows:
        return "No model was there to measure."
    context = max(figure.context for row in rows for figure in row.decoding)
    last = [(row, figure) for row in rows for figure in row.decoding if figure.context == context]
    by_speed = sorted(last, key=lambda item: item[1].tokens_per_second)
    by_state = sorted(last, key=lambda item: item[1].state_bytes)
    (slow_row, slow), (fast_row, fast) = by_speed[0], by_speed[-1]
    (small_row, small), (large_row, large) = by_state[0], by_state[-1]
    sentence = (
        f"After a text of {context:,} tokens {fast_row.name} writes fastest, {fast.tokens_per_second:,.0f} tokens a "
        f"second ({slow_row.name}, the slowest, {slow.tokens_per_second:,.0f}), and {small_row.name} keeps least of "
        f"it, {bytes_text(small.state_bytes)} ({large_row.name}, the most, {bytes_text(large.state_bytes)})"
    )
    growing = [row.name for row in rows if row.decoding[-1].state_bytes > row.decoding[0].state_bytes]
    if not growing:
        return f"{sentence}; no state grows with the text."
    return f"{sentence}; what {listed(growing)} {'keeps' if len(growing) == 1 else 'keep'} grows with the text."


def reached(row: RowRecord, level: float, measure: str) -> Reached:
    """When the mean over the seeds first was as good as a level, straight lines drawn between validations."""
    points = mean_course(row, measure)
    way = sign(measure)
    before = points[0]
    for point in points:
        if way * (point[measure] - level) <= 0:
            gap = before[measure] - point[measure]
            share = 1.0 if gap == 0 else (before[measure] - level) / gap
            at = {axis: before[axis] + share * (point[axis] - before[axis]) for axis in AXES}
            return Reached(row.name, **at)
        before = point
    return Reached(row.name, **{axis: points[-1][axis] for axis in AXES})


def mean_course(row: RowRecord, measure: str) -> list[dict[str, float]]:
    """Means over the finished seeds at each validation, and the lowest and highest of the measure."""
    found = []
    for points in zip(*(run.course for run in row.finished), strict=False):
        values = [float(getattr(point, measure)) for point in points]
        axes = {axis: statistics.fmean(getattr(point, axis) for point in points) for axis in AXES}
        found.append({**axes, measure: statistics.fmean(values), "low": min(values), "high": max(values)})
    return found


def listed(names: Sequence[str]) -> str:
    """a, b and c."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
