"""Running a comparison: training every run, then writing the report."""

import dataclasses
import itertools
import time
from collections.abc import Sequence
from pathlib import Path

from multilin.analysis.compare.answers import of_steps, remarks_on
from multilin.analysis.compare.measure import final_score, measure_rows, prompt_of
from multilin.analysis.compare.record import (
    FAILED,
    Comparison,
    RunRecord,
    best_choice,
    further_choice,
    is_finished,
    make_row,
    ranking,
    read_run,
    validation_remarks,
)
from multilin.analysis.compare.report import REPORT_FILES, write_reports
from multilin.analysis.compare.rows import SPEED_FILE, Choice, Plan, plan_choice, plan_rows
from multilin.analysis.compare.sweep import Sweep, check_sweep, choices_of
from multilin.analysis.machine import examine
from multilin.data.tasks import find_task
from multilin.errors import InputError, listed, plural
from multilin.files import check_folder, check_writable
from multilin.files.lock import locked_folder
from multilin.runs.files import RECIPE_FILE
from multilin.training.environment import num_processes
from multilin.training.loop import train
from multilin.training.outcomes import TrainingFailed, TrainingInterrupted
from multilin.training.progress import TrainingProgress
from multilin.training.recipe import Recipe, first_difference, load_recipe
from multilin.training.run_folder import RunFolder


def compare(sweep: Sweep, *, overwrite: bool = False, progress: TrainingProgress | None = None) -> Comparison:
    """Train every row with every seed, measure the models, and write the reports into the sweep's folder.

    Finished runs are not trained again, and stopped runs are resumed. A run that fails is recorded with its error.

    Args:
        sweep: what to compare.
        overwrite: replace runs in the folder.
        progress: shows every run; None shows nothing.

    Raises:
        InputError: a row that cannot be trained, or a folder with runs of another sweep. It is raised before training.
        TrainingInterrupted: SIGINT or SIGTERM came. A checkpoint was saved; a call without `overwrite` resumes it.
    """
    if num_processes() > 1:
        raise InputError("compare: runs in one process; start it without torchrun")
    check_sweep(sweep)
    if sweep.task is not None:
        find_task(sweep.task)
    output = Path(sweep.output)
    with locked_folder("output", sweep.output):  # the text, as Path("") would not be refused
        if (output / RECIPE_FILE).exists():
            raise InputError(f"output: {output} holds a run; give another folder for the comparison")
        for name in (*REPORT_FILES, SPEED_FILE):
            check_writable("output", output / name)
        comparison = _compare(sweep, _Training(sweep, overwrite, progress or TrainingProgress()))
        write_reports(comparison, output)
    return comparison


def _compare(sweep: Sweep, training: "_Training") -> Comparison:
    plans = plan_rows(sweep, training.progress)
    training.begin(plans)
    tuning = {plan.row.name: training.tune(plan) for plan in plans}
    best = {
        plan.row.name: training.plan(plan, best_choice(runs, training.measure) if runs else plan.choice)
        for plan, runs in zip(plans, tuning.values(), strict=True)
    }
    runs: dict[str, list[RunRecord]] = {name: [] for name in best}
    for seed, (name, plan) in itertools.product(sweep.seeds, best.items()):  # all rows with one seed before the next
        runs[name].append(training.run(plan, seed))
    rows = []
    for name, plan in best.items():
        recipe = plan.run(sweep.output, sweep.seeds[0])
        if sweep.final_half:
            runs[name] = [final_score(run, Path(sweep.output), recipe) for run in runs[name]]
        fields = dataclasses.asdict(recipe)
        rows.append(make_row(plan, fields, runs[name], tuning[name], training.measure, sweep.colour(name)))
    prompt = None if sweep.task else prompt_of(plans[0].recipe)
    training.progress.message("measuring how fast the models generate")
    rows = measure_rows(rows, Path(sweep.output), prompt)
    chance = find_task(sweep.task).chance if sweep.task else None
    found = ranking(rows, training.measure, sweep.budget.given, chance)
    comparison = Comparison(
        title=sweep.title, measure=training.measure, budget=sweep.budget.given, seeds=sweep.seeds,
        stages=sweep.stages if any(tuning.values()) else [],
        trial_share=sweep.trial_share, final_half=sweep.final_half, task=sweep.task,
        one_tokenizer=len({plan.text for plan in best.values()}) == 1, prompt=prompt or "", rows=rows,
        chance=chance, remarks=[], machine=dataclasses.asdict(examine()), **found._asdict(),
    )  # fmt: skip
    remarks = [*remarks_on(comparison), *validation_remarks(rows, Path(sweep.output))]
    return dataclasses.replace(comparison, remarks=remarks)


class _Training:
    """Training the runs of a sweep, one after another."""

    def __init__(self, sweep: Sweep, overwrite: bool, progress: TrainingProgress) -> None:
        self.sweep, self.overwrite, self.progress = sweep, overwrite, progress
        self.measure = "accuracy" if sweep.task else "bits_per_byte"
        self._num_trials: dict[str, int] = {}  # of each row; before its tuning, the most it can have
        self._num_others = 0
        self._work: dict[str, float] = {}  # left in each row's runs, see `_work_of`
        self._done: dict[str, tuple[float, float]] = {}  # work and seconds of each row's last run
        self._plans: dict[str, Plan] = {}
        self._trained: dict[str, RunRecord] = {}

    def begin(self, plans: list[Plan]) -> None:
        """Count the runs and check the folders known before tuning. With `overwrite`, clear all folders of the rows."""
        for plan in plans:
            stages = self.sweep.stages_of(plan.row.name)
            trials = {str(choice) for stage in stages for choice in choices_of(stage, plan.choice)}
            is_first_seed_tried = bool(trials) and self.sweep.trial_share == 1  # its run is the best trial
            self._num_trials[plan.row.name] = len(trials)
            num_others = len(self.sweep.seeds) - is_first_seed_tried
            self._num_others += num_others
            work = len(trials) * self._work_of(plan.trial(self.sweep.trial_share)) + num_others * self._work_of(plan)
            self._work[plan.row.name] = work
            first = choices_of(stages[0], plan.choice) if trials else [plan.choice]
            if trials:
                self._say_trials(plan, first)
            for choice, seed in itertools.product(first, self.sweep.seeds):
                planned = self.plan(plan, choice)
                for run in (planned, planned.trial(self.sweep.trial_share)):
                    self.check(run.run(self.sweep.output, seed))
        # Clear also folders of later stages: resuming, which is done without --overwrite, would refuse their old runs.
        for plan, seed in itertools.product(plans if self.overwrite else (), self.sweep.seeds):
            for ending in ("", "-*"):
                for path in Path(self.sweep.output).glob(f"{plan.row.name}-s{seed}{ending}/{RECIPE_FILE}"):
                    with locked_folder("output", path.parent):
                        RunFolder(path.parent).clear()

    def _say_trials(self, plan: Plan, first: Sequence[Choice]) -> None:
        """Print how a row is tuned, such as `elita: learning rate from 3 trials of 1/4 of the steps (0.002, ...)`."""
        names = listed([name.split(".")[-1].replace("_", " ") for name in plan.choice])
        trials = plural(self._num_trials[plan.row.name], "trial") + of_steps(self.sweep.trial_share)
        tried = f" ({', '.join(str(*choice.values()) for choice in first)})" if len(plan.choice) == 1 else ""
        more = f", then up to {self.sweep.extend} more if the best is at an end" if self.sweep.extend else ""
        self.progress.message(f"{plan.row.name}: {names} from {trials}{tried}{more}")

    def plan(self, plan: Plan, choice: Choice) -> Plan:
        """A row's plan with another choice; it is made only once."""
        name = f"{plan.row.name} {choice}"
        if name not in self._plans:
            self._plans[name] = plan_choice(self.sweep, plan, choice, self.progress)
        return self._plans[name]

    def check(self, recipe: Recipe) -> None:
        """Refuse a run if the output folder holds another run or is inside the folder of the run's text."""
        path = Path(recipe.output)
        check_folder("output", path)
        RunFolder(path).check_outside(recipe)
        if self.overwrite or not (path / RECIPE_FILE).is_file():
            return
        if (difference := first_difference(load_recipe(path), recipe)) is not None:
            name, old, new = difference
            raise InputError(
                f"output: {path} holds a run with {name} {old!r}, but this comparison has {new!r}; give another "
                "--output, or replace the run with --overwrite"
            )

    def tune(self, plan: Plan) -> list[RunRecord]:
        """Try a row's choices of every stage on the first seed, then values beyond the tried ones; return the trials.

        Each stage starts from the best choice so far. A choice that was tried before is not tried again.
        """
        tuning: list[RunRecord] = []
        best, num_before = plan.choice, len(self._trained)
        stages = self.sweep.stages_of(plan.row.name)
        for stage in stages:
            for choice in choices_of(stage, best):
                if choice not in [run.choice for run in tuning]:
                    tuning.append(self._try(plan, choice))
            best = best_choice(tuning, self.measure)
        for _ in range(self.sweep.extend if stages else 0):
            further = further_choice(tuning, self.measure)
            if further is None:
                break
            try:
                self.plan(plan, further)
            except InputError as error:
                self.progress.message(f"{plan.row.name} is not tuned further: {error}")
                break
            self._num_trials[plan.row.name] += 1
            self._work[plan.row.name] += self._work_of(plan.trial(self.sweep.trial_share))
            tuning.append(self._try(plan, further))
        self._num_trials[plan.row.name] = len(self._trained) - num_before
        return tuning

    def _try(self, plan: Plan, choice: Choice) -> RunRecord:
        """Run a trial; a choice that cannot be trained counts as a failed run."""
        seed = self.sweep.seeds[0]
        try:
            planned = self.plan(plan, choice)
        except InputError as error:
            trial = dataclasses.replace(plan, choice=choice).trial(self.sweep.trial_share)
            folder = Path(trial.run("", seed).output)
            return RunRecord(seed, folder.name, dict(choice), FAILED, str(error))
        return self.run(planned.trial(self.sweep.trial_share), seed)

    def run(self, plan: Plan, seed: int) -> RunRecord:
        """Return the record of a run, which is trained unless it is finished."""
        recipe = plan.run(self.sweep.output, seed)
        self.check(recipe)
        folder, failure, max_steps = Path(recipe.output), None, recipe.training.num_steps
        if recipe.output not in self._trained:
            total = sum(self._num_trials.values()) + self._num_others
            heading = f"[{len(self._trained) + 1}/{total}] {folder.name}"
            if is_finished(folder, max_steps) and not self.overwrite:
                self.progress.message(f"{heading}: finished in an earlier call")
            else:
                size = f"{plural(max_steps, 'step')} of {plural(plan.tokens_per_step, 'token')}"
                self.progress.message(f"{heading}: {size}")
                self.progress.ahead(lambda seconds: self._seconds_after(plan, seconds))
                is_whole, began = self.overwrite or not (folder / RECIPE_FILE).is_file(), time.monotonic()
                failure = self._train(recipe)
                if is_whole and failure is None:
                    self._done[plan.row.name] = (self._work_of(plan), time.monotonic() - began)
            self._work[plan.row.name] -= self._work_of(plan)
            self._trained[recipe.output] = read_run(plan, folder, seed, failure)
        return self._trained[recipe.output]

    def _work_of(self, plan: Plan) -> float:
        """The work of a run, roughly proportional to its time: the seconds of the budget, or FLOPs."""
        if (seconds := self.sweep.budget.seconds) is not None:
            return seconds * (self.sweep.trial_share if plan.is_trial else 1)
        return plan.recipe.training.num_steps * plan.tokens_per_step * plan.flops_per_token

    def _seconds_after(self, plan: Plan, seconds: float) -> float:
        """Estimate the seconds of all later runs. A row without a finished run is assumed to be as fast as this run."""
        here = self._work_of(plan)
        left = self._work | {plan.row.name: self._work[plan.row.name] - here}
        done = {plan.row.name: (here, seconds)} | self._done
        return sum(max(work, 0.0) * s / w for name, work in left.items() for w, s in [done.get(name, (here, seconds))])

    def _train(self, recipe: Recipe) -> str | None:
        """Train, and return the error as a sentence, or None if training succeeded."""
        resume = not self.overwrite and (Path(recipe.output) / RECIPE_FILE).is_file()
        try:
            train(recipe, resume=resume, overwrite=self.overwrite, progress=self.progress)
        except TrainingInterrupted as stop:
            sentence, command = str(stop).split("; ")[0], "the same command" + " without --overwrite" * self.overwrite
            raise TrainingInterrupted(
                f"{Path(recipe.output).name} {sentence}; {command} resumes there", stop.exit_code - 128
            ) from None
        # A failed run does not stop the others.
        except (InputError, TrainingFailed, RuntimeError, ValueError, MemoryError) as error:
            is_sentence = isinstance(error, InputError | TrainingFailed)
            reason = " ".join(str(error).split())[:300]
            failure = reason if is_sentence else f"{type(error).__name__}: {reason}"
            self.progress.message(f"failed: {failure}")
            return failure
        return None
