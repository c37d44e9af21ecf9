"""Running a comparison: every run into its folder, then the report."""

import dataclasses
import os
from pathlib import Path

from multilin.analysis.compare.grid import best_choice, further_choice
from multilin.analysis.compare.measure import measure_decoding, prompt_of, write_sample
from multilin.analysis.compare.plan import SPEED_FILE, Choice, Plan, plan_rows
from multilin.analysis.compare.record import (
    Comparison,
    RowRecord,
    RunRecord,
    is_finished,
    make_row,
    ranking,
    read_run,
)
from multilin.analysis.compare.remarks import remarks_on
from multilin.analysis.compare.report import REPORT_FILES, write_reports
from multilin.analysis.compare.sweep import Sweep, check_sweep
from multilin.errors import InputError, plural
from multilin.files import check_folder, check_writable
from multilin.machine import examine
from multilin.training.lock import locked_folder
from multilin.training.outcomes import TrainingFailed, TrainingInterrupted
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
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError("compare: runs are compared in one process; start it without torchrun")
    check_sweep(sweep)
    with locked_folder(sweep.output):
        if Path(sweep.output, RECIPE_FILE).exists():
            raise InputError(f"output: {sweep.output} holds a run; give another folder for the comparison")
        for name in (*REPORT_FILES, SPEED_FILE):
            check_writable("output", Path(sweep.output, name))
        return _compare(sweep, _Work(sweep, overwrite, progress or TrainingProgress()))


def _compare(sweep: Sweep, work: "_Work") -> Comparison:
    plans = plan_rows(sweep, work.progress)
    for plan in plans:
        for seed in sweep.seeds:
            for choice in sweep.choices:
                work.check(plan, seed, choice)
    tuning = work.tune(plans)
    best = {plan.row.name: best_choice(tuning[plan.row.name], work.measure) for plan in plans}
    runs = work.train_seeds(plans, best)
    rows = [
        make_row(
            plan,
            dataclasses.asdict(plan.run(sweep.output, sweep.seeds[0], best[plan.row.name])),
            best[plan.row.name],
            runs[plan.row.name],
            tuning[plan.row.name],
            work.measure,
        )
        for plan in plans
    ]
    prompt = "" if sweep.task else prompt_of(plans[0].recipe)
    work.progress.message("measuring how fast the models generate")
    rows = _measured(rows, sweep, prompt)
    comparison = _describe(sweep, plans, rows, prompt, work.measure)
    write_reports(comparison, Path(sweep.output))
    return comparison


class _Work:
    """Training the runs of a sweep, one after another."""

    def __init__(self, sweep: Sweep, overwrite: bool, progress: TrainingProgress) -> None:
        self.sweep, self.overwrite, self.progress = sweep, overwrite, progress
        self.output = Path(sweep.output)
        self.measure = "accuracy" if sweep.task else "bits_per_byte"
        combinations = len(sweep.choices)
        self.total = len(sweep.rows) * (combinations if combinations > 1 else 0)
        self.total += len(sweep.rows) * (len(sweep.seeds) - (combinations > 1))
        self.count = 0
        self._trained: dict[str, RunRecord] = {}

    def check(self, plan: Plan, seed: int, choice: Choice) -> None:
        """Refuse a folder that holds another run than this sweep's."""
        recipe = plan.run(self.sweep.output, seed, choice)
        path = Path(recipe.output)
        check_folder("output", path)
        if self.overwrite or not (path / RECIPE_FILE).is_file():
            return
        difference = first_difference(load_recipe(path), recipe)
        if difference is not None:
            name, old, new = difference
            raise InputError(
                f"output: {path} holds a run with {name} {old!r}, but this comparison has {new!r}; give another "
                "--output, or replace it with --overwrite"
            )

    def tune(self, plans: list[Plan]) -> dict[str, list[RunRecord]]:
        """Every row with every choice of the grid, on the first seed."""
        if len(self.sweep.choices) == 1:
            return {plan.row.name: [] for plan in plans}
        return {plan.row.name: self._tune(plan) for plan in plans}

    def train_seeds(self, plans: list[Plan], best: dict[str, Choice]) -> dict[str, list[RunRecord]]:
        """Every row with every seed, seed by seed, so that what is there early can be compared."""
        found: dict[str, list[RunRecord]] = {plan.row.name: [] for plan in plans}
        for seed in self.sweep.seeds:
            for plan in plans:
                found[plan.row.name].append(self.run(plan, seed, best[plan.row.name]))
        return found

    def run(self, plan: Plan, seed: int, choice: Choice) -> RunRecord:
        """One run, trained unless that is done."""
        recipe = plan.run(self.sweep.output, seed, choice)
        if recipe.output not in self._trained:
            self.count += 1
            self._trained[recipe.output] = self._train(plan, recipe, seed, choice)
        return self._trained[recipe.output]

    def _tune(self, plan: Plan) -> list[RunRecord]:
        seed = self.sweep.seeds[0]
        tuning = [self.run(plan, seed, choice) for choice in self.sweep.choices]
        for _ in range(self.sweep.extend_grid):
            further = further_choice(tuning, self.measure)
            if further is None:
                break
            try:
                plan.run(self.sweep.output, seed, further)
            except InputError as error:
                self.progress.message(f"{plan.row.name} is not tuned further: {error}")
                break
            self.check(plan, seed, further)
            self.total += 1
            tuning.append(self.run(plan, seed, further))
        return tuning

    def _train(self, plan: Plan, recipe: Recipe, seed: int, choice: Choice) -> RunRecord:
        folder, failure = Path(recipe.output), None
        heading = f"[{self.count}/{self.total}] {folder.name}"
        if is_finished(folder, recipe.training.max_steps) and not self.overwrite:
            self.progress.message(f"{heading}: done before")
        else:
            self.progress.message(
                f"{heading}: {plural(recipe.training.max_steps, 'step')} of {plural(plan.tokens_per_step, 'token')}"
            )
            failure = self._failure(recipe)
        return read_run(plan, folder, seed, choice, failure, self.output)

    def _failure(self, recipe: Recipe) -> str | None:
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
            known = isinstance(error, InputError | TrainingFailed)
            reason = " ".join(str(error).split())[:300]
            failure = reason if known else f"{type(error).__name__}: {reason}"
            self.progress.message(f"failed: {failure}")
            return failure
        return None


def _measured(rows: list[RowRecord], sweep: Sweep, prompt: str) -> list[RowRecord]:
    """The rows with decoding speeds, states and samples of the first finished run of each."""
    folders = {row.name: Path(sweep.output, row.finished[0].folder) for row in rows if row.finished}
    decoding = measure_decoding(folders)
    samples = {} if sweep.task else {name: write_sample(folder, prompt) for name, folder in folders.items()}
    return [
        dataclasses.replace(
            row,
            decoding=decoding[row.name].figures if row.name in decoding else [],
            memory=decoding[row.name].memory if row.name in decoding else None,
            sample=samples.get(row.name),
            remarks=row.remarks + (decoding[row.name].remarks if row.name in decoding else []),
        )
        for row in rows
    ]


def _describe(sweep: Sweep, plans: list[Plan], rows: list[RowRecord], prompt: str, measure: str) -> Comparison:
    off_budget, order, differences = ranking(rows, measure, sweep.budget.given)
    comparison = Comparison(
        title=sweep.title,
        measure=measure,
        budget=sweep.budget.given,
        seeds=sweep.seeds,
        grid=sweep.grid,
        task=sweep.task,
        one_tokenizer=len({plan.text for plan in plans}) == 1,
        prompt=prompt,
        rows=rows,
        off_budget=off_budget,
        order=order,
        differences=differences,
        remarks=[],
        machine=dataclasses.asdict(examine()),
    )
    return dataclasses.replace(comparison, remarks=remarks_on(comparison))
