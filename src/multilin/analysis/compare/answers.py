"""A comparison's results in words: its numbers, the cost to run the models, and remarks on limits."""

from collections.abc import Iterator
from fractions import Fraction

from rich.filesize import decimal

from multilin.analysis.compare.record import FAILED, Comparison, RowRecord
from multilin.analysis.compare.statistics import FEWEST_SEEDS, Difference
from multilin.errors import listed, plural

UNITS = {"bits_per_byte": "bits per byte", "accuracy": "accuracy"}
AXES = {"tokens": "training tokens", "seconds": "seconds of training", "flops": "FLOPs"}
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


def mean_text(comparison: Comparison, row: RowRecord) -> str:
    """The mean of a row's score, such as 2.345."""
    assert row.score is not None
    return f"{100 * row.score.mean:.1f} %" if comparison.measure == "accuracy" else f"{row.score.mean:.3f}"


def difference_text(comparison: Comparison, difference: Difference) -> str:
    """The difference with its sign, in the unit of the measure."""
    is_accuracy = comparison.measure == "accuracy"
    return f"{100 * difference.difference:+.1f} points" if is_accuracy else f"{difference.difference:+.3f}"


def share_text(difference: Difference) -> str:
    """By how many per cent the better row's bits per byte, or share of wrong answers, is below the other row's."""
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
            "between seeds; `noise` means that no difference was shown, not that the rows are equal."
        )
    if failed := [row.name for row in comparison.rows if row.status == FAILED]:
        yield f"No figures for {listed(failed)}: all runs failed."
    yield from _remarks_on_tuning(comparison)


def of_steps(share: float) -> str:
    """The size of a trial, such as ` of 1/4 of the steps`; empty if it is a whole run."""
    return "" if share == 1 else f" of {Fraction(share).limit_denominator(100)} of the steps"


def _remarks_on_tuning(comparison: Comparison) -> Iterator[str]:
    if comparison.final_half:
        yield (
            "The score uses the first, third, ... validation documents. Tuning and the validations during training, "
            "which the curves show, used the second, fourth, ... documents."
        )
    if not comparison.stages:
        return
    text = "the documents that the score does not use" if comparison.final_half else "the validation text itself"
    tuned = [row for row in comparison.rows if row.tuning]
    trials = sorted({len(row.tuning) for row in tuned})
    who = "Every row" if len(tuned) == len(comparison.rows) else listed([row.name for row in tuned])
    yield (
        f"{who} was tuned on seed {comparison.seeds[0]} ({', '.join(map(str, trials))} trials"
        f"{of_steps(comparison.trial_share)} each), judged by {text}; the best values were then used with all seeds."
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
