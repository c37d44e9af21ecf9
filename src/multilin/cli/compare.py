"""The verb that compares models."""

import importlib
from collections.abc import Iterator
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from multilin.analysis.compare.sweep import Budget, Sweep, changed, find_sweep
from multilin.cli.arguments import POSITIONAL
from multilin.cli.messages import as_flags, loading, say_next
from multilin.cli.tables import make_console, print_table
from multilin.settings import settings
from multilin.settings.bounds import Amount, Names, Repeats
from multilin.training.recipe import Changes

if TYPE_CHECKING:
    from multilin.analysis.compare.record import Comparison

LONGER, MOST_SEEDS = 4, 100  # factor of the next budget if no row has learned a task; seeds of a comparison


@settings
class CompareArguments:
    """The models to compare, and their budget."""

    rows: Annotated[Names, POSITIONAL] = field(default_factory=list)  # a sweep file, or names of recipes and models
    tokens: Amount | None = None  # budget of each run in training tokens
    flops: Amount | None = None  # budget of each run in floating-point operations, instead of tokens
    seconds: Amount | None = None  # budget of each run in seconds of training, instead of tokens
    seeds: Repeats | None = None  # training runs of each row (model), each with another seed
    task: str | None = None  # a recall task instead of a text: mqar, induction, copy, ... or mqar?num_pairs=16
    only: str | None = None  # train and report only these rows: names separated by commas
    overwrite: bool = False  # replace the runs in the output folder


def compare(arguments: CompareArguments, changes: Changes) -> None:
    """Train several models with the same budget; report which is best, how fast each learns and what it costs to run.

    Without names, compare all architectures, GPT-2 and Llama on text from Python's library, with three seeds each.
    Recipe fields given as flags apply to every model. Run the same command again to continue an interrupted comparison.
    """
    if len(arguments.rows) > 1:  # perhaps names of models, which are known only after all models are imported
        with loading():
            importlib.import_module("multilin.model.factory")
    budget = Budget(tokens=arguments.tokens, flops=arguments.flops, seconds=arguments.seconds)
    sweep = changed(
        find_sweep(arguments.rows, arguments.task),
        budget=budget, num_seeds=arguments.seeds, task=arguments.task, changes=changes,
        only=None if arguments.only is None else [name.strip() for name in arguments.only.split(",")],
    )  # fmt: skip
    with loading():
        from multilin.analysis.compare.report import REPORT_FILE
        from multilin.analysis.compare.run import compare
        from multilin.cli.progress import TrainingDisplay
    with TrainingDisplay() as display:
        comparison = compare(sweep, overwrite=arguments.overwrite, progress=display)
    print_comparison(comparison)
    print(f"\nReport: {Path(sweep.output, REPORT_FILE)}")
    say_next(*_next(arguments, changes, sweep, comparison))


def _next(
    arguments: CompareArguments, changes: Changes, sweep: Sweep, comparison: "Comparison"
) -> Iterator[list[object]]:
    """The commands to type next: to use the best row, or to train more in order to find the best row."""
    given = {name: value for name, value in vars(arguments).items() if name not in ("rows", "overwrite")} | changes

    def again(**changed: object) -> list[object]:
        return ["multilin", "compare", *arguments.rows, *as_flags(given | changed)]

    if best := comparison.best:
        yield ["multilin", "generate", Path(sweep.output, comparison.row(best[0]).finished[0].folder)]
    if comparison.has_no_learner:
        ((kind, budget),) = sweep.budget.given.items()
        yield again(**{kind: LONGER * budget}, output=f"{sweep.output}-longer")
    elif comparison.off_budget:
        yield [*again(), "--overwrite"]
    elif not best:
        yield again()
    elif len(best) > 1 and sweep.seeds == list(range(len(sweep.seeds))):
        yield again(seeds=min(2 * len(sweep.seeds) + 1, MOST_SEEDS))  # finished runs are not repeated


def print_comparison(comparison: "Comparison") -> None:
    """Print the verdict, a table of all rows with the best first, and the remarks."""
    from multilin.analysis.compare.answers import UNITS
    from multilin.analysis.compare.report import table
    from multilin.analysis.compare.verdict import EQUAL, caveats, verdict_sentences

    console = make_console()
    others = [equal for axis, equal in EQUAL.items() if axis not in comparison.budget]
    verdicts = ["verdict", *others, "compute for the same score"] if len(comparison.rows) > 2 else []  # or said above
    names = ["row", "validation", *verdicts, "parameters", "training tokens/s"]
    head = ["row", UNITS[comparison.measure], *(name.removesuffix(" for the same score") for name in names[2:])]
    style = "bold" if comparison.is_ranked else "yellow"
    console.print(f"\n{verdict_sentences(comparison)}\n", style=style, soft_wrap=True, markup=False)
    for line in caveats(comparison):
        console.print(f"{line}\n", soft_wrap=True, markup=False)
    print_table(
        "lrl".ljust(len(names), "r")[: len(names)] if verdicts else "lrrr",
        table(comparison, names),
        head=head,
        bold={0} if len(comparison.best) == 1 else (),
    )
    console.print()
    for remark in comparison.remarks:
        console.print(remark, style="dim", soft_wrap=True, markup=False)
    for row in comparison.rows:
        for remark in row.remarks:
            console.print(f"{row.name}: {remark}", style="dim", soft_wrap=True, markup=False)
