"""The verb of the command line that compares models."""

from dataclasses import field
from pathlib import Path
from typing import Annotated

from rich.console import Console

from multilin.analysis.compare.sweep import Budget, changed, find_sweep
from multilin.analysis.compare.words import REPORT_FILE
from multilin.arguments import POSITIONAL
from multilin.messages import say_next
from multilin.settings import settings
from multilin.settings.bounds import Amount, Names, Repeats
from multilin.threads import warn_of_contention
from multilin.training.recipe import Changes


@settings
class CompareArguments:
    """What to compare, and with how much."""

    rows: Annotated[Names, POSITIONAL] = field(default_factory=list)  # a sweep file; or recipes and models by name
    tokens: Amount | None = None  # budget of each run: training tokens
    flops: Amount | None = None  # or floating-point operations
    seconds: Amount | None = None  # or seconds of training
    seeds: Repeats | None = None  # train every row so many times
    task: str | None = None  # a recall task instead of a text: mqar, induction, copy, ... or mqar?num_pairs=16
    overwrite: bool = False  # replace the runs in the output folder


def compare(what: CompareArguments, changes: Changes) -> None:
    """Train several models with the same budget and report which is best, how fast it learns, what it costs to run.

    Without a name: all architectures, GPT-2 and Llama on the text inside Python itself, with three seeds each.
    Fields of recipes given as flags go to every row. Started again, it goes on where it stopped.
    """
    from multilin.analysis.compare.run import compare
    from multilin.analysis.compare.table import print_comparison

    budget = Budget(tokens=what.tokens, flops=what.flops, seconds=what.seconds)
    sweep = changed(
        find_sweep(what.rows, what.task), budget=budget, num_seeds=what.seeds, task=what.task, changes=changes
    )
    warn_of_contention()
    found = compare(sweep, overwrite=what.overwrite)
    print_comparison(found, Console(highlight=False))
    print(f"\nReport: {Path(sweep.output, REPORT_FILE)}")
    best = [found.row(name).finished[0].folder for name in found.order[:1]]
    say_next(*[f"multilin generate {Path(sweep.output, folder)}" for folder in best], "multilin compare --help")
