"""How many seconds a step of each row takes, measured once and kept in the comparison's folder."""

import dataclasses
import statistics
import tempfile
import warnings
from pathlib import Path

from pydantic import TypeAdapter

from multilin.analysis.compare.rows import Plan
from multilin.errors import InputError
from multilin.files import write_whole
from multilin.settings.bounds import Amount
from multilin.settings.inputs import read_json, to_json
from multilin.training.loop import train
from multilin.training.outcomes import TrainingFailed, TrainingInterrupted
from multilin.training.progress import TrainingProgress
from multilin.training.run_folder import RunFolder

SPEED_FILE = "speed.json"
MEASURED_STEPS, WARM_UP_STEPS, MEASURED_TURNS = 20, 5, 3


def seconds_per_step(output: Path, plans: list[Plan], progress: TrainingProgress) -> dict[str, float]:
    """Median seconds of a step, by `speed_name`; measured once, so that a resumed comparison has the same steps."""
    path = output / SPEED_FILE
    speeds = read_speeds(path) if path.is_file() else {}
    times: dict[str, list[float]] = {}
    for _ in range(MEASURED_TURNS):  # in turns, so that a busy minute does not fall on one row
        for plan in plans:
            if (name := plan.speed_name) not in speeds:
                progress.message(f"measuring the speed of {name}")
                times.setdefault(name, []).extend(_step_times(plan))
    speeds |= {name: statistics.median(seconds) for name, seconds in times.items()}
    write_whole(path, to_json(speeds, indent=1) + "\n")
    return speeds


def read_speeds(path: Path) -> dict[str, float]:
    """The seconds per step of rows by name, from speed.json.

    Raises:
        InputError: the file is damaged.
    """
    try:
        return TypeAdapter(dict[str, Amount]).validate_python(read_json(path, "output"))
    except ValueError as error:  # pydantic's, or ours about the file
        raise InputError(f"output: {path} is damaged; delete it, and the speeds are measured again") from error


def _step_times(plan: Plan) -> list[float]:
    """Seconds of single steps of a short run; a loss that is not finite fails the row's own runs, and not this one.

    Raises:
        TrainingInterrupted: SIGINT or SIGTERM.
    """
    optimizer = dataclasses.replace(plan.recipe.optimizer, nonfinite="skip")
    with tempfile.TemporaryDirectory(prefix="multilin-") as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* is not finite")
        training = dataclasses.replace(
            plan.recipe.training, max_steps=MEASURED_STEPS, minutes=None, log_every_steps=1, eval_every_steps=0,
            eval_max_tokens=1, save_every_steps=0,
        )  # fmt: skip
        output = Path(folder, "run")
        try:
            train(dataclasses.replace(plan.recipe, optimizer=optimizer, training=training, output=str(output)))
        except TrainingInterrupted as stop:
            raise TrainingInterrupted(
                f"stopped while the speed of {plan.speed_name} was measured; the same command measures it again",
                stop.exit_code - 128,
            ) from None
        except TrainingFailed:  # after the last step, as the model is no good
            if len(RunFolder(output).read_metrics()) < MEASURED_STEPS:
                raise
        lines = RunFolder(output).read_metrics()[WARM_UP_STEPS:]
    return [plan.tokens_per_step / line["tokens_per_second"] for line in lines]
