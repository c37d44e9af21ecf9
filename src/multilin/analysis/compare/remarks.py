"""What a reader must know to judge a comparison, one sentence each."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from multilin.analysis.compare.answers import best_sentence
from multilin.analysis.compare.record import FAILED, Comparison


def remarks_on(comparison: Comparison) -> list[str]:
    """The caveats of the whole comparison; those of single rows are with the rows."""
    return [*_about_budget(comparison), *_about_text(comparison), *_about_seeds(comparison), *_about_grid(comparison)]


def _about_budget(comparison: Comparison) -> Iterator[str]:
    if not comparison.is_ranked:
        yield best_sentence(comparison)


def _about_text(comparison: Comparison) -> Iterator[str]:
    recipes = [row.recipe for row in comparison.rows]
    if not comparison.one_tokenizer:
        yield (
            "The rows read different tokens (their tokenizers or texts differ), so losses per token cannot be "
            "compared; bits per byte can, as long as the validation text is the same."
        )
    if len({str(recipe["data"]) for recipe in recipes}) > 1:
        yield "The rows do not have the same text: a difference may be the text's."
    batches = {(row.recipe["model"]["n_positions"], row.tokens_per_step) for row in comparison.rows}
    if len(batches) > 1:
        yield "Blocks or batches differ between rows, so they do not read the text in the same order."
    if "tokens" not in comparison.budget and len({row.max_steps for row in comparison.rows}) > 1:
        yield f"With a budget of {next(iter(comparison.budget))}, rows read different numbers of tokens."


def _about_seeds(comparison: Comparison) -> Iterator[str]:
    if len(comparison.seeds) == 1:
        yield "One seed: nothing can be said about which differences are noise."
    elif len(comparison.seeds) < 5:
        yield (
            f"{len(comparison.seeds)} seeds: Welch's t-test finds only differences that are large beside the spread; "
            "`within noise` means not shown, not equal."
        )
    if failed := [row.name for row in comparison.rows if row.status == FAILED]:
        yield f"No figures of {', '.join(failed)}, which failed."


def _about_grid(comparison: Comparison) -> Iterator[str]:
    if not comparison.grid:
        yield "Nothing was tuned here: every row has the learning rate its recipe names, which may suit some better."
        return
    yield (
        f"Every row was tuned with the same values on seed {comparison.seeds[0]}, by the validation text itself; the "
        "best ones were then trained with all seeds."
    )
    for name in comparison.grid:
        tried = {row.name: [run.choice[name] for run in row.tuning] for row in comparison.rows}
        if further := [f"{', '.join(map(str, new))} for {row}" for row, new in _further(comparison, name, tried)]:
            yield f"Where the best {name} was the last of these, it was tried further: {'; '.join(further)}."
        at_end = [row.name for row in comparison.rows if _is_last(row.choice.get(name), tried[row.name])]
        if at_end:
            yield f"The best {name} of {', '.join(at_end)} is at the end of what was tried: another may do better."


def _further(
    comparison: Comparison, name: str, tried: Mapping[str, Sequence[Any]]
) -> Iterator[tuple[str, Sequence[Any]]]:
    """Rows and the values that were tried for them beyond the grid."""
    for row, values in tried.items():
        if new := [value for value in values if value not in comparison.grid[name]]:
            yield row, new


def _is_last(value: Any, tried: Sequence[Any]) -> bool:
    if len(set(tried)) < 2 or not all(isinstance(other, int | float) for other in tried):
        return False
    return value in (min(tried), max(tried))
