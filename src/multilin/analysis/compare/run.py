"""Running a comparison: every run into its folder, then the report."""

import dataclasses
import itertools
from pathlib import Path

from multilin.analysis.compare.answers import remarks_on
from multilin.analysis.compare.measure import measure_rows, prompt_of
from multilin.analysis.compare.plan import SPEED_FILE, Choice, Plan, plan_rows
from multilin.analysis.compare.record import (
    Comparison,
    RunRecord,
    best_choice,
    further_choice,
    is_finished,
    make_row,
    ranking,
    read_run,
)
from multilin.analysis.compare.report import REPORT_FILES, write_reports
from multilin.analysis.compare.sweep import Sweep, check_sweep
from multilin.errors import InputError, plural
from multilin.files import check_folder, check_writable
from multilin.machine import examine
from multilin.training.lock import locked_folder
from multilin.training.outcomes import TrainingFailed, TrainingInterrupted
from multilin.training.processes import num_processes
from multilin.training.progress import TrainingProgress
from multilin.training.recipe import RECIPE_FILE, Recipe, first_difference, load_recipe
from multilin.training.trainer import train


def compare(sweep: Sweep, *, overwrite: bool = False, progress: TrainingProgress | None = None) -> Comparison:
    """Train every row with every seed, measure the models, and write the reports into the sweep's folder.

    Finished runs are not trained again, stopped ones go on. A run that fails is recorded with its sentence.

    Args:
        sweep: what to compare.
        overwrite: replace runs in the folder.
        progress: told of every run; None shows nothing.

    Raises:
        InputError: a row that cannot be trained, or a folder with runs of another sweep; nothing was trained.
        TrainingInterrupted: SIGINT or SIGTERM, after a checkpoint; the same call goes on there.
    """
    if num_processes() > 1:
        raise InputError("compare: runs are compared in one process; start it without torchrun")
    check_sweep(sweep)
    output = Path(sweep.output)
    with locked_folder(sweep.output):  # an empty name is refused, which a Path no longer shows
        if (output / RECIPE_FILE).exists():
            raise InputError(f"output: {output} holds a run; give another folder for the comparison")
        for name in (*REPORT_FILES, SPEED_FILE):
            check_writable("output", output / name)
        comparison = _compare(sweep, _Training(sweep, overwrite, progress or TrainingProgress()))
        write_reports(comparison, output)
    return comparison


def _compare(sweep: Sweep, training: "_Training") -> Comparison:
    plans = plan_rows(sweep, training.progress)
    for plan, seed, choice in itertools.product(plans, sweep.seeds, sweep.choices):
        training.check(plan.run(sweep.output, seed, choice))
    tuning = {plan.row.name: training.tune(plan) for plan in plans}
    best = {name: best_choice(runs, training.measure) if runs else sweep.choices[0] for name, runs in tuning.items()}
    runs: dict[str, list[RunRecord]] = {name: [] for name in best}
    for seed, plan in itertools.product(sweep.seeds, plans):  # so that early runs of all rows can be compared
        runs[plan.row.name].append(training.run(plan, seed, best[plan.row.name]))
    rows = []
    for plan in plans:
        name = plan.row.name
        recipe = dataclasses.asdict(plan.run(sweep.output, sweep.seeds[0], best[name]))
        rows.append(make_row(plan, recipe, best[name], runs[name], tuning[name], training.measure))
    prompt = None if sweep.task else prompt_of(plans[0].recipe)
    training.progress.message("measuring how fast the models generate")
    rows = measure_rows(rows, Path(sweep.output), prompt)
    off_budget, order, differences = ranking(rows, training.measure, sweep.budget.given)
    comparison = Comparison(
        title=sweep.title,
        measure=training.measure,
        budget=sweep.budget.given,
        seeds=sweep.seeds,
        grid=sweep.grid,
        task=sweep.task,
        one_tokenizer=len({plan.text for plan in plans}) == 1,
        prompt=prompt or "",
        rows=rows,
        off_budget=off_budget,
        order=order,
        differences=differences,
        remarks=[],
        machine=dataclasses.asdict(examine()),
    )
    return dataclasses.replace(comparison, remarks=list(remarks_on(comparison)))


class _Training:
    """Training the runs of a sweep, one after another."""

    def __init__(self, sweep: Sweep, overwrite: bool, progress: TrainingProgress) -> None:
        self.sweep, self.overwrite, self.progress = sweep, overwrite, progress
        self.measure = "accuracy" if sweep.task else "bits_per_byte"
        # The run of the first seed is one of those that tried the choices.
        self.total = len(sweep.rows) * (len(sweep.seeds) + len(sweep.choices) - 1)
        self._trained: dict[str, RunRecord] = {}

    def check(self, recipe: Recipe) -> None:
        """Refuse a run whose folder holds another one."""
        path = Path(recipe.output)
        check_folder("output", path)
        if self.overwrite or not (path / RECIPE_FILE).is_file():
            return
        if (difference := first_difference(load_recipe(path), recipe)) is not None:
            name, old, new = difference
            raise InputError(
                f"output: {path} holds a run with {name} {old!r}, but this comparison has {new!r}; give another "
                "--output, or replace it with --overwrite"
            )

    def tune(self, plan: Plan) -> list[RunRecord]:
        """A row with every choice of the grid, and further ones beyond its ends, on the first seed; none for one."""
        if len(self.sweep.choices) == 1:
            return []
        seed = self.sweep.seeds[0]
        tuning = [self.run(plan, seed, choice) for choice in self.sweep.choices]
        for _ in range(self.sweep.extend_grid):
            further = further_choice(tuning, self.measure)
            if further is None:
                break
            try:
                recipe = plan.run(self.sweep.output, seed, further)
            except InputError as error:
                self.progress.message(f"{plan.row.name} is not tuned further: {error}")
                break
            self.check(recipe)
            self.total += 1
            tuning.append(self.run(plan, seed, further))
        return tuning

    def run(self, plan: Plan, seed: int, choice: Choice) -> RunRecord:
        """One run, trained unless that is done."""
        recipe = plan.run(self.sweep.output, seed, choice)
        folder, failure, max_steps = Path(recipe.output), None, recipe.training.max_steps
        if recipe.output not in self._trained:
            heading = f"[{len(self._trained) + 1}/{self.total}] {folder.name}"
            if is_finished(folder, max_steps) and not self.overwrite:
                self.progress.message(f"{heading}: done before")
            else:
                size = f"{plural(max_steps, 'step')} of {plural(plan.tokens_per_step, 'token')}"
                self.progress.message(f"{heading}: {size}")
                failure = self._train(recipe)
            self._trained[recipe.output] = read_run(plan, folder, seed, choice, failure)
        return self._trained[recipe.output]

    def _train(self, recipe: Recipe) -> str | None:
        """Train; the sentence of what went wrong, None if nothing did."""
        resume = not self.overwrite and (Path(recipe.output) / RECIPE_FILE).is_file()
        try:
            train(recipe, resume=resume, overwrite=self.overwrite, progress=self.progress)
        except TrainingInterrupted as stop:
            sentence = str(stop).split("; ")[0]
            raise TrainingInterrupted(
                f"{Path(recipe.output).name} {sentence}; the same command goes on there", stop.exit_code - 128
            ) from None
        # Whatever ends one run says nothing about the others.
        except (InputError, TrainingFailed, RuntimeError, ValueError, MemoryError) as error:
            is_sentence = isinstance(error, InputError | TrainingFailed)
            reason = " ".join(str(error).split())[:300]
            failure = reason if is_sentence else f"{type(error).__name__}: {reason}"
            self.progress.message(f"failed: {failure}")
            return failure
        return None
