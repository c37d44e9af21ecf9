"""The runs that try the values of a grid: which were best, and what to try next."""

from collections.abc import Sequence

from multilin.analysis.compare.plan import Choice
from multilin.analysis.compare.record import FINISHED, RunRecord, score_of, sign


def best_choice(tuning: Sequence[RunRecord], measure: str) -> Choice:
    """The values with the best last validation; the first ones where every run failed."""
    finished = [run for run in tuning if run.status == FINISHED]
    if not finished:
        return tuning[0].choice if tuning else {}
    return min(finished, key=lambda run: sign(measure) * score_of(run, measure)).choice


def further_choice(tuning: Sequence[RunRecord], measure: str) -> dict[str, float] | None:
    """The value beyond the best one if that is the last of those tried, by the ratio between it and its neighbour.

    Args:
        tuning: runs with two or more positive values of one field; failed ones count as tried.
        measure: by which the runs are judged.
    """
    best = best_choice(tuning, measure)
    (name,) = best
    tried = sorted({float(run.choice[name]) for run in tuning})
    end = float(best[name])
    if end not in (tried[0], tried[-1]) or all(run.status != FINISHED for run in tuning):
        return None
    neighbour = tried[1] if end == tried[0] else tried[-2]
    return {name: float(f"{end * end / neighbour:.6g}")}
