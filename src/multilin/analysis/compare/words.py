"""How figures of a comparison are written, the same on the terminal and in every report."""

from multilin.analysis.compare.record import Comparison, RowRecord

UNITS = {"bits_per_byte": "bits per byte", "accuracy": "accuracy"}
REPORT_FILE = "comparison.html"
SMALLEST = 0.001  # a p below this is not written out
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def amount(value: float) -> str:
    """Three digits and a prefix: 1.23 M."""
    for size, prefix in _PREFIXES:
        if value >= size:
            return f"{value / size:.3g} {prefix}"
    return f"{value:.3g}"


def score_text(comparison: Comparison, row: RowRecord) -> str:
    """Mean and standard deviation: 2.345 ± 0.012."""
    assert row.score is not None
    if comparison.measure == "accuracy":
        deviation = "" if row.score.deviation is None else f" ± {100 * row.score.deviation:.1f}"
        return f"{100 * row.score.mean:.1f}{deviation} %"
    return f"{row.score.mean:.3f}" + ("" if row.score.deviation is None else f" ± {row.score.deviation:.3f}")


def difference_text(comparison: Comparison, difference: float) -> str:
    """With its sign, in the unit of the measure."""
    if comparison.measure == "accuracy":
        return f"{100 * difference:+.1f} points"
    return f"{difference:+.3f}"


def p_text(p: float) -> str:
    """Three decimals, or that there are more zeros."""
    return f"< {SMALLEST:g}" if p < SMALLEST else f"{p:.3f}"


def difference_texts(comparison: Comparison, row: RowRecord) -> tuple[str, str]:
    """A row beside the best: the difference, and its p with what that means; or one word and nothing."""
    if row.score is None:
        return "failed", ""
    if not comparison.is_ranked:
        return "not ranked", ""
    if row.name == comparison.order[0]:
        return "best", ""
    found = comparison.difference_to_best(row.name)
    assert found is not None
    difference = difference_text(comparison, found.difference)
    if found.p is None:
        return difference, "one seed"
    return difference, f"{p_text(found.p)}{' (noise)' if found.within_noise else ''}"


def verdict(comparison: Comparison, row: RowRecord) -> str:
    """What may be said of a row beside the best."""
    found = comparison.difference_to_best(row.name) if row.score and comparison.is_ranked else None
    if found is None:
        return difference_texts(comparison, row)[0]
    text = difference_text(comparison, found.difference)
    if found.p is None:
        return f"{text}, one seed: no statement"
    p = f"p {'' if found.p < SMALLEST else '= '}{p_text(found.p)}".replace(" ", "\u00a0")  # never broken apart
    return f"{text}, within noise ({p})" if found.within_noise else f"{text}, {p}"


def budget_text(comparison: Comparison, value: float | None = None) -> str:
    """The budget of every run, or another value in its unit: 400 k training tokens."""
    kind, budget = next(iter(comparison.budget.items()))
    value = budget if value is None else value
    units = {"tokens": "training tokens", "flops": "FLOPs", "seconds": "seconds of training"}
    return f"{f'{round(value, 1):g}' if kind == 'seconds' else amount(value)} {units[kind]}"


def bytes_text(count: float) -> str:
    """Three digits and a unit: 12.3 kB."""
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} bytes"
