"""The sentences and figures of a comparison as text: the answers to its three questions, and what limits them."""

import statistics
from collections.abc import Iterator

from rich.filesize import decimal

from multilin.analysis.compare.record import FAILED, TOLERANCE, Comparison, RowRecord, sign
from multilin.analysis.compare.statistics import LEVEL, Difference
from multilin.errors import listed

UNITS = {"bits_per_byte": "bits per byte", "accuracy": "accuracy"}
AXES = {"tokens": "training tokens", "seconds": "seconds of training", "flops": "FLOPs"}
SMALLEST = 0.001  # a p below this is not written out
_PREFIXES = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def amount(value: float) -> str:
    """Three digits and a prefix: 1.23 M."""
    value = float(f"{value:.3g}")  # rounded before the prefix is chosen
    for size, prefix in _PREFIXES:
        if value >= size:
            return f"{value / size:.3g} {prefix}"
    return f"{value:.3g}"


def budget_text(comparison: Comparison, value: float | None = None) -> str:
    """The budget of every run, or another value in its unit: 400 k training tokens."""
    ((kind, budget),) = comparison.budget.items()
    value = budget if value is None else value
    return f"{f'{round(value, 1):g}' if kind == 'seconds' else amount(value)} {AXES[kind]}"


def score_text(comparison: Comparison, row: RowRecord) -> str:
    """Mean and standard deviation: 2.345 ± 0.012."""
    assert row.score is not None
    scale, digits, unit = (100, 1, " %") if comparison.measure == "accuracy" else (1, 3, "")
    deviation = "" if row.score.deviation is None else f" ± {scale * row.score.deviation:.{digits}f}"
    return f"{scale * row.score.mean:.{digits}f}{deviation}{unit}"


def difference_text(comparison: Comparison, difference: Difference) -> str:
    """With its sign, in the unit of the measure."""
    is_accuracy = comparison.measure == "accuracy"
    return f"{100 * difference.difference:+.1f} points" if is_accuracy else f"{difference.difference:+.3f}"


def p_text(p: float) -> str:
    """Three decimals, or that there are more zeros."""
    return f"< {SMALLEST:g}" if p < SMALLEST else f"{p:.3f}"


def verdict(comparison: Comparison, row: RowRecord) -> str:
    """A row beside the best: the difference, and whether it is more than noise."""
    difference = comparison.difference_to_best(row.name)
    if difference is None:
        if row.score is None:
            return "failed"
        return "not ranked" if not comparison.is_ranked else "best" if len(comparison.order) > 1 else "alone"
    text = difference_text(comparison, difference)
    if difference.p is None:
        return f"{text}, one seed: no statement"
    p = f"p {'' if difference.p < SMALLEST else '= '}{p_text(difference.p)}".replace(" ", "\u00a0")  # in one line
    return f"{text}, within noise ({p})" if difference.within_noise else f"{text}, {p}"


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
    if len(comparison.order) == 1:
        return f"{best.name} has {figures} ({meaning}) with {budget_text(comparison)} for each run."
    sentence = f"{best.name} is best with {budget_text(comparison)} for each run: {figures} ({meaning})"
    differences = [d for d in comparison.differences if d.other == best.name]
    if unknown := [d.one for d in differences if d.p is None]:
        return f"{sentence}. {listed(unknown)} may differ from it by chance alone: one seed says nothing about that."
    if close := [d.one for d in differences if d.within_noise]:
        return f"{sentence}; {listed(close)} {'is' if len(close) == 1 else 'are'} within noise of it (p > {LEVEL:g})."
    return f"{sentence}; the differences to all others are larger than noise."


def speed_sentence(comparison: Comparison) -> str:
    """Which rows need least to become as good as the worst row in the end."""
    if len(comparison.order) < 2:
        return "There are not two rows whose courses could be compared."
    rows = [comparison.row(name) for name in comparison.order]
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
    return f"To reach {level}, where {worst.name} ends, {'; '.join(parts) or 'all need as much'}."


def cost_sentence(comparison: Comparison) -> str:
    """Which rows generate fastest and keep the smallest state after the longest prompt."""
    rows = [row for row in comparison.rows if row.decoding]
    if not rows:
        return "No model was there to measure."
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
    """Tokens, seconds and FLOPs after which the mean over the seeds first was as good as a level.

    Between two validations the mean is taken to follow a straight line. A row that never was as good spent everything.
    """
    points = mean_course(row, measure)
    for before, point in zip([points[0], *points], points, strict=False):
        if sign(measure) * (point[measure] - level) <= 0:
            gap = before[measure] - point[measure]
            share = 1.0 if gap == 0 else (before[measure] - level) / gap
            return {axis: before[axis] + share * (point[axis] - before[axis]) for axis in AXES}
    return {axis: points[-1][axis] for axis in AXES}


def mean_course(row: RowRecord, measure: str) -> list[dict[str, float]]:
    """Means over the finished seeds at each validation, and the lowest and highest of the measure."""
    course = []
    for points in zip(*(run.course for run in row.finished), strict=False):
        values = [float(getattr(point, measure)) for point in points]
        axes = {axis: statistics.fmean(getattr(point, axis) for point in points) for axis in AXES}
        course.append({**axes, measure: statistics.fmean(values), "low": min(values), "high": max(values)})
    return course


def remarks_on(comparison: Comparison) -> Iterator[str]:
    """What limits the whole comparison, a sentence each; the remarks on single rows are with the rows."""
    if not comparison.is_ranked:
        yield best_sentence(comparison)
    recipes = [row.recipe for row in comparison.rows]
    if not comparison.one_tokenizer:
        yield (
            "The rows were trained on different tokens (their tokenizers or texts differ), so losses per token cannot "
            "be compared; bits per byte can, as long as the validation text is the same."
        )
    if len({str(recipe["data"]) for recipe in recipes}) > 1:
        yield "The rows do not have the same text: a difference may be the text's."
    if len({(row.recipe["model"]["n_positions"], row.tokens_per_step) for row in comparison.rows}) > 1:
        yield "Blocks or batches differ between rows, so the text does not come in the same order."
    if "tokens" not in comparison.budget and len({row.max_steps for row in comparison.rows}) > 1:
        yield f"With a budget of {next(iter(comparison.budget))}, rows are trained on different numbers of tokens."
    if len(comparison.seeds) == 1:
        yield "One seed: nothing can be said about which differences are noise."
    elif len(comparison.seeds) < 5:
        yield (
            f"{len(comparison.seeds)} seeds: Welch's t-test finds only differences that are large beside the spread; "
            "`within noise` means not shown, not equal."
        )
    if failed := [row.name for row in comparison.rows if row.status == FAILED]:
        yield f"No figures of {', '.join(failed)}, which failed."
    yield from _remarks_on_tuning(comparison)


def _remarks_on_tuning(comparison: Comparison) -> Iterator[str]:
    if comparison.final_half:
        yield (
            "The score is that of the first, third, ... document of the validation text, which are read whole; the "
            "second, fourth, ... were validated on in training and decided the tuning, and the curves are theirs."
        )
    if not comparison.stages:
        yield "Nothing was tuned here: every row has the learning rate its recipe names, which may suit some better."
        return
    text = "documents that the score is not taken from" if comparison.final_half else "the validation text itself"
    trials = sorted({len(row.tuning) for row in comparison.rows})
    share = "" if comparison.trial_share == 1 else f" with {comparison.trial_share:.0%} of the budget"
    yield (
        f"Every row was tuned with the same values on seed {comparison.seeds[0]} ({', '.join(map(str, trials))} trials "
        f"each{share}), by {text}; the best ones were then trained with all seeds."
    )
    for name, number in {name: len(values) for stage in comparison.stages for name, values in stage.items()}.items():
        further, at_end = [], []
        for row in comparison.rows:
            tried = [run.choice[name] for run in row.tuning]
            if len(comparison.stages) == len(row.choice) == 1 and tried[number:]:
                further.append(f"{', '.join(map(str, tried[number:]))} for {row.name}")
            is_number = all(type(value) in (int, float) for value in tried)  # a switch has no end to go beyond
            if is_number and len(set(tried)) > 1 and row.choice.get(name) in (min(tried), max(tried)):
                at_end.append(row.name)
        if further:
            yield f"Where the best {name} was the last of these, it was tried further: {'; '.join(further)}."
        if at_end:
            yield f"The best {name} of {', '.join(at_end)} is at the end of what was tried: another may do better."
