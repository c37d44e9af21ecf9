"""A comparison's results in words: answers to the three questions of the report, remarks on limits, and numbers."""

import math
import statistics
from collections.abc import Iterator, Sequence

import numpy as np
from rich.filesize import decimal

from multilin.analysis.compare.record import FAILED, TOLERANCE, Comparison, RowRecord, guesses, sign
from multilin.analysis.compare.statistics import FEWEST_SEEDS, LEVEL, Difference, pairwise, spread
from multilin.errors import duration, listed, plural

UNITS = {"bits_per_byte": "bits per byte", "accuracy": "accuracy"}
AXES = {"tokens": "training tokens", "seconds": "seconds of training", "flops": "FLOPs"}
RATE = "optimizer.learning_rate"
SMALLEST = 0.001  # the smallest p that is written out
_PREFIXES = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def amount(value: float) -> str:
    """A number with three digits and an SI prefix, such as 1.23 M."""
    value = float(f"{value:.3g}")  # rounded before the prefix is chosen
    for size, prefix in _PREFIXES:
        if value >= size:
            return f"{value / size:.3g} {prefix}"
    return f"{value:.3g}"


def budget_text(comparison: Comparison, value: float | None = None) -> str:
    """The budget of every run, or another amount in the unit of the budget, such as 400 k training tokens."""
    ((kind, budget),) = comparison.budget.items()
    value = budget if value is None else value
    return f"{f'{round(value, 1):g}' if kind == 'seconds' else amount(value)} {AXES[kind]}"


def score_text(comparison: Comparison, row: RowRecord) -> str:
    """The mean and standard deviation of a row's score, such as 2.345 ± 0.012."""
    assert row.score is not None
    scale, digits, unit = (100, 1, " %") if comparison.measure == "accuracy" else (1, 3, "")
    deviation = "" if row.score.deviation is None else f" ± {scale * row.score.deviation:.{digits}f}"
    return f"{scale * row.score.mean:.{digits}f}{deviation}{unit}"


def difference_text(comparison: Comparison, difference: Difference) -> str:
    """The difference with its sign, in the unit of the measure."""
    is_accuracy = comparison.measure == "accuracy"
    return f"{100 * difference.difference:+.1f} points" if is_accuracy else f"{difference.difference:+.3f}"


def share_text(difference: Difference) -> str:
    """How much lower the better row's bits per byte or share of wrong answers is, in per cent of the other row's."""
    return "" if difference.share is None else f"{100 * difference.share:.{1 if difference.share >= 0.001 else 3}f} %"


def interval_text(comparison: Comparison, difference: Difference) -> str:
    """The 95 % interval of the difference, in the unit of the measure; empty if it is not known."""
    if difference.interval is None:
        return ""
    if comparison.measure == "accuracy":
        return "{:+.1f} to {:+.1f} points".format(*(100 * end for end in difference.interval))
    return "{:+.3f} to {:+.3f}".format(*difference.interval)


def p_text(p: float) -> str:
    """p with three decimals, or as `< 0.001`."""
    return f"< {SMALLEST:g}" if p < SMALLEST else f"{p:.3f}"


def chance_text(comparison: Comparison) -> str:
    """The accuracy of guessing on a task."""
    return f"{100 * (comparison.chance or 0.0):.1f} %"


def verdict(comparison: Comparison, row: RowRecord) -> str:
    """The difference between a row and the best row, and whether it is larger than noise."""
    if row.score is None:
        return "failed"
    guesses = "no better than chance" if row.name in comparison.at_chance else ""
    difference = comparison.difference_to_best(row.name)
    if difference is None:
        if not comparison.is_ranked:
            return guesses or "not ranked"
        alone, leads = len(comparison.order) == 1, len(comparison.best) > 1
        return "only row" if alone else "best mean" if leads else "best"
    text = difference_text(comparison, difference)
    if comparison.measure == "bits_per_byte":
        text += f" ({share_text(difference)})"
    if difference.p is None:
        text += f", {difference.unknown}"
    else:
        p = f"p {'' if difference.p < SMALLEST else '= '}{p_text(difference.p)}".replace(" ", "\u00a0")  # unbroken
        text += f", within noise ({p})" if difference.within_noise else f", {p}"
    return f"{text}; {guesses}" if guesses else text


def best_sentence(comparison: Comparison) -> str:
    """Sentences on which row is best at the budget and at equal seconds, and how certain this is."""
    return " ".join(_verdict_sentences(comparison))


def _verdict_sentences(comparison: Comparison) -> Iterator[str]:
    if not comparison.order:
        yield "Every row failed."
        return
    if comparison.has_no_learner:
        yield (
            f"No row has learned the task: with {budget_text(comparison)} for each run, no row is above chance, "
            f"{chance_text(comparison)} of the answers right."
        )
    if comparison.off_budget:
        missed = [f"{name} used {budget_text(comparison, value)}" for name, value in comparison.off_budget.items()]
        hint = "; a budget in tokens does not depend on the machine" if "seconds" in comparison.budget else ""
        yield (
            f"The rows are not ranked: each run had a budget of {budget_text(comparison)}, but "
            f"{listed(missed)}, which is more than {TOLERANCE:.0%} off{hint}."
        )
    if not comparison.is_ranked:
        return
    if len(comparison.order) > 1 and (sentence := _tuned_unlike(comparison)):
        yield sentence
    yield _leader(comparison)
    if comparison.chance is not None:
        yield f"Chance is {chance_text(comparison)}."
    if comparison.at_chance:
        yield f"{_are(comparison.at_chance)} no better than chance."
    if len(comparison.order) > 1 and "seconds" not in comparison.budget:
        yield _at_equal_seconds(comparison)


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
    # Trials of values beyond those of the sweep are not counted: every row gets them by the same rule.
    most = math.prod(map(len, comparison.stages[0].values())) if len(comparison.stages) == 1 else math.inf
    trials = {row.name: min(len(row.tuning), most) for row in rows}
    if len(set(trials.values())) == 1:
        return ""
    return f"The rows were not tuned equally: {listed([f'{name} had {n} trials' for name, n in trials.items()])}."


def _leader(comparison: Comparison) -> str:
    """The best row, its distance to the second best, and the rows that may be as good."""
    best = comparison.row(comparison.order[0])
    assert best.score is not None
    unit, seeds = UNITS[comparison.measure], best.score.count
    figures = f"{score_text(comparison, best)} {unit}".replace("% accuracy", "% of the answers right")
    figures += f" (mean ± standard deviation of {seeds} seeds)" if seeds > 1 else " (one seed)"
    budget = f"with {budget_text(comparison)} for each run"
    if len(comparison.order) == 1:
        return f"{best.name} has {figures} {budget}."
    leads = "is best" if len(comparison.best) == 1 else "has the best mean"
    tied = [d.one for d in comparison.to_best if not d.difference]
    sentence = f"{best.name} {leads} {budget}: {figures}"
    sentence += f", the same as {listed(tied)}" if tied else f", {_ahead(comparison, comparison.to_best[0])}"
    noisy = [d.one for d in comparison.to_best if d.within_noise]
    if len(comparison.best) == 1:
        return f"{sentence}. The differences to all others exceed noise (p ≤ {LEVEL:g}, {_pairs(comparison)})."
    parts = [sentence]
    if noisy:
        parts.append(f"{_are(noisy)} within noise of {best.name} (p > {LEVEL:g}, {_pairs(comparison)})")
    for reason in dict.fromkeys(d.unknown for d in comparison.to_best if d.unknown):
        names = [d.one for d in comparison.to_best if d.unknown == reason]
        parts.append(f"{listed(names)}: cannot say whether the difference is noise ({reason})")
    return f"{'; '.join(parts)}."


def _pairs(comparison: Comparison) -> str:
    return f"corrected for {plural(sum(d.p is not None for d in comparison.differences), 'pair')}"


def _ahead(comparison: Comparison, difference: Difference) -> str:
    """The best row's lead, such as `0.281 below gpt2, the next (13.2 %; 95 % interval 0.253 to 0.309)`."""
    is_text = comparison.measure == "bits_per_byte"
    factor, digits = (1, 3) if is_text else (-100, 1)  # makes the figure positive
    details = [share_text(difference) + ("" if is_text else " fewer wrong answers")] if difference.share else []
    if difference.interval is not None:
        low, high = sorted(factor * end for end in difference.interval)
        details.append(f"95 % interval {low:.{digits}f} to {high:.{digits}f}")
    size = f"{factor * difference.difference:.{digits}f} {'below' if is_text else 'points above'}"
    return f"{size} {difference.one}, the next" + (f" ({'; '.join(details)})" if details else "")


def _at_equal_seconds(comparison: Comparison) -> str:
    """A sentence on which row leads when the row with the shortest training ends."""
    measure, rows = comparison.measure, [comparison.row(name) for name in comparison.order]
    ends = {row.name: mean_course(row, measure)[-1]["seconds"] for row in rows}
    first = min(rows, key=lambda row: ends[row.name])
    when = f"After the same training time ({duration(ends[first.name])}, when {first.name} ends)"
    found = {row.name: _scores_at(row, ends[first.name], measure) for row in rows}
    late = [name for name, values in found.items() if not values]
    unknown = f" ({listed(late)} had no validation yet)" if late else ""
    scores = {name: spread(values) for name, values in found.items() if values}
    scores = dict(sorted(scores.items(), key=lambda item: sign(measure) * item[1].mean))
    guessing = [
        name for name in scores if guesses(comparison.row(name), scores[name].mean, comparison.chance, len(rows))
    ]
    if len(guessing) == len(scores):
        return f"{when} no row is above chance yet{unknown}."
    leader = next(iter(scores))
    if len(scores) == 1:
        return f"{when} {leader} leads{unknown}."
    difference = pairwise(scores, measure, guessing)[0]
    if not difference.difference:
        return f"{when} {leader} and {difference.one} are equal{unknown}."
    noise = ", within noise" if difference.within_noise else ""
    if difference.unknown:
        noise = f"; cannot say whether the difference is noise ({difference.unknown})"
    return f"{when} {leader} leads, {_ahead(comparison, difference)}{noise}{unknown}."


def _scores_at(row: RowRecord, seconds: float, measure: str) -> list[float]:
    """The score of each seed after a training time, interpolated between validations; empty before the first one."""
    times = [point["seconds"] for point in mean_course(row, measure)]
    if seconds < times[0]:
        return []
    courses = ([getattr(point, measure) for point in run.course[: len(times)]] for run in row.finished)
    return [float(np.interp(seconds, times, course)) for course in courses]


def speed_sentence(comparison: Comparison) -> str:
    """A sentence on which rows need the fewest tokens, seconds and FLOPs to reach the worst row's final score."""
    rows = [comparison.row(name) for name in comparison.order if name not in comparison.at_chance]
    if len(rows) < 2:
        learned = "are better than chance" if comparison.at_chance else "have finished"
        return f"Fewer than two rows {learned}, so speeds of learning cannot be compared."
    ends = {row.name: mean_course(row, comparison.measure)[-1][comparison.measure] for row in rows}
    worst = max(rows, key=lambda row: sign(comparison.measure) * ends[row.name])
    costs = {row.name: cost_to_reach(row, ends[worst.name], comparison.measure) for row in rows}
    needs: dict[str, list[str]] = {}
    for axis, name in AXES.items():
        best = min(costs, key=lambda row: costs[row][axis])
        least = "least" if axis == "seconds" else "fewest"
        spent, usual = amount(costs[best][axis]), amount(costs[worst.name][axis])
        if spent != usual:
            needs.setdefault(best, []).append(f"the {least} {name} ({spent} instead of {usual})")
    parts = [f"{name} needs {listed(axes)}" for name, axes in needs.items()]
    unit = UNITS[comparison.measure]
    level = f"{100 * ends[worst.name]:.1f} %" if unit == "accuracy" else f"{ends[worst.name]:.3f}"
    level = f"{level} {unit}"
    return f"To reach {level}, the final score of {worst.name}, {'; '.join(parts) or 'all rows need the same'}."


def cost_sentence(comparison: Comparison) -> str:
    """A sentence on which rows generate fastest and keep the smallest state after the longest prompt."""
    rows = [row for row in comparison.rows if row.decoding]
    if not rows:
        return "No row has a trained model to measure."
    context = max(figures.context for row in rows for figures in row.decoding)
    last = {row.name: figures for row in rows for figures in row.decoding if figures.context == context}
    growing = [row.name for row in rows if row.decoding[-1].state_bytes > row.decoding[0].state_bytes]
    if len(last) == 1:
        ((name, figures),) = last.items()
        grows = "grows" if name in growing else "does not grow"
        return (
            f"After {context:,} tokens {name} generates {figures.tokens_per_second:,.0f} tokens a second, with a state "
            f"of {decimal(figures.state_bytes)}, which {grows} with the sequence."
        )
    slow, fast = (end(last, key=lambda name: last[name].tokens_per_second) for end in (min, max))
    small, large = (end(last, key=lambda name: last[name].state_bytes) for end in (min, max))
    sentence = (
        f"After {context:,} tokens {fast} generates fastest, {last[fast].tokens_per_second:,.0f} tokens a second "
        f"({slow}, the slowest, {last[slow].tokens_per_second:,.0f}), and {small} has the smallest state, "
        f"{decimal(last[small].state_bytes)} ({large}, the largest, {decimal(last[large].state_bytes)})"
    )
    return f"{sentence}; {f'the state of {listed(growing)} grows' if growing else 'no state grows'} with the sequence."


def cost_to_reach(row: RowRecord, level: float, measure: str) -> dict[str, float]:
    """The tokens, seconds and FLOPs after which the mean over the seeds first reached a level.

    Between two validations the mean is interpolated linearly. If a row never reached the level, its budget counts.
    """
    points = mean_course(row, measure)
    for before, point in zip([points[0], *points], points, strict=False):
        if sign(measure) * (point[measure] - level) <= 0:
            gap = before[measure] - point[measure]
            share = 1.0 if gap == 0 else (before[measure] - level) / gap
            return {axis: before[axis] + share * (point[axis] - before[axis]) for axis in AXES}
    return {axis: points[-1][axis] for axis in AXES}


def mean_course(row: RowRecord, measure: str) -> list[dict[str, float]]:
    """The means over the finished seeds at each validation, and the lowest and highest score of a seed."""
    course = []
    for points in zip(*(run.course for run in row.finished), strict=False):
        values = [float(getattr(point, measure)) for point in points]
        axes = {axis: statistics.fmean(getattr(point, axis) for point in points) for axis in AXES}
        course.append({**axes, measure: statistics.fmean(values), "low": min(values), "high": max(values)})
    return course


def remarks_on(comparison: Comparison) -> Iterator[str]:
    """Remarks on the limits of the whole comparison; a `RowRecord` has the remarks on its row."""
    recipes = [row.recipe for row in comparison.rows]
    if not comparison.one_tokenizer:
        yield (
            "The rows were trained on different tokens (their tokenizers or texts differ), so losses per token cannot "
            "be compared; bits per byte can, as long as the validation text is the same."
        )
    if len({str(recipe["data"]) for recipe in recipes}) > 1:
        yield "The rows have different texts, so a difference may come from the text."
    if len({(row.recipe["model"]["n_positions"], row.tokens_per_step) for row in comparison.rows}) > 1:
        yield "Block or batch sizes differ between rows, so the rows read the text in different orders."
    if "tokens" not in comparison.budget and len({row.max_steps for row in comparison.rows}) > 1:
        yield f"With a budget of {next(iter(comparison.budget))}, rows are trained on different numbers of tokens."
    if len(comparison.seeds) < FEWEST_SEEDS:
        yield f"{plural(len(comparison.seeds), 'seed')}: multilin cannot say which differences are noise."
    elif len(comparison.seeds) < 5:
        yield (
            f"{len(comparison.seeds)} seeds: Welch's t-test finds only differences much larger than the spread "
            "between seeds; `within noise` means that no difference was shown, not that the rows are equal."
        )
    if failed := [row.name for row in comparison.rows if row.status == FAILED]:
        yield f"No figures for {listed(failed)}: all runs failed."
    yield from _remarks_on_tuning(comparison)


def _remarks_on_tuning(comparison: Comparison) -> Iterator[str]:
    if comparison.final_half:
        yield (
            "The score uses the first, third, ... validation documents. Tuning and the validations during training, "
            "which the curves show, used the second, fourth, ... documents."
        )
    if not comparison.stages:
        return
    text = "the documents that the score does not use" if comparison.final_half else "the validation text itself"
    trials = sorted({len(row.tuning) for row in comparison.rows})
    share = "" if comparison.trial_share == 1 else f" with {comparison.trial_share:.0%} of the budget"
    yield (
        f"Every row was tuned with the same values on seed {comparison.seeds[0]} ({', '.join(map(str, trials))} trials "
        f"each{share}), judged by {text}; the best values were then used with all seeds."
    )
    for name, number in {name: len(values) for stage in comparison.stages for name, values in stage.items()}.items():
        further, at_end = [], []
        for row in comparison.rows:
            tried = [run.choice[name] for run in row.tuning]
            if len(comparison.stages) == len(row.choice) == 1 and tried[number:]:
                further.append(f"{', '.join(map(str, tried[number:]))} for {row.name}")
            is_number = all(type(value) in (int, float) for value in tried)  # True is no number
            if is_number and len(set(tried)) > 1 and row.choice.get(name) in (min(tried), max(tried)):
                at_end.append(row.name)
        if further:
            yield f"Where the best {name} was the lowest or highest, further values were tried: {'; '.join(further)}."
        if at_end:
            yield f"The best {name} of {listed(at_end)} is the lowest or highest tried; a value beyond may be better."
