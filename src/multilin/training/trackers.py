"""Sends each line of metrics.jsonl to TensorBoard, Weights & Biases, MLflow or Trackio."""

import dataclasses
import importlib.util
import os
from collections.abc import Callable
from typing import Any, NamedTuple

from multilin.errors import InputError
from multilin.training.recipe import Recipe
from multilin.training.run_folder import RunFolder


class Tracker(NamedTuple):
    """A connection to a tracker: a function that sends a line, and a function that closes the connection."""

    log: Callable[[dict[str, Any]], object]
    close: Callable[[], object]


def check_trackers(recipe: Recipe) -> None:
    """Raise if the package of a tracker is not installed.

    Raises:
        InputError: names the first tracker whose package is missing.
    """
    for name in recipe.training.report_to:
        if importlib.util.find_spec(name) is None:
            package = "'multilin[tensorboard]'" if name == "tensorboard" else name
            raise InputError(f"training.report_to: {name} given, but it is not installed; pip install {package}")


def open_trackers(recipe: Recipe, folder: RunFolder) -> list[Tracker]:
    """Connect to the trackers that a recipe names, for the run in a folder."""
    makers = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow, "trackio": _trackio}
    return [makers[name](recipe, folder) for name in recipe.training.report_to]


def _tensorboard(recipe: Recipe, folder: RunFolder) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    # Hides events that a killed run wrote after the checkpoint from which this run continues.
    lines = folder.read_metrics()
    events = SummaryWriter(str(folder.tensorboard), purge_step=lines[-1]["step"] + 1 if lines else None)

    def log(line: dict[str, Any]) -> None:
        for name, value in line.items():
            if name != "step":
                events.add_scalar(name, value, line["step"])
        events.flush()

    return Tracker(log, events.close)


def _wandb(recipe: Recipe, folder: RunFolder) -> Tracker:
    import wandb

    project = os.environ.get("WANDB_PROJECT", "multilin")
    run = wandb.init(project=project, name=folder.path.name, config=dataclasses.asdict(recipe))
    return Tracker(lambda line: run.log(line, step=line["step"]), run.finish)


def _mlflow(recipe: Recipe, folder: RunFolder) -> Tracker:
    import mlflow

    mlflow.start_run(run_name=folder.path.name)
    return Tracker(lambda line: mlflow.log_metrics(line, step=line["step"]), mlflow.end_run)


def _trackio(recipe: Recipe, folder: RunFolder) -> Tracker:
    import trackio

    project = os.environ.get("TRACKIO_PROJECT", "multilin")
    run = trackio.init(project=project, name=folder.path.name, config=dataclasses.asdict(recipe))
    return Tracker(run.log, run.finish)
