"""The optimizer files: trajectories of single tensors, whole or by rows, and learning rates over time."""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from multilin.training.optimizers import MatrixMoment, NormalizedSGD
from multilin.training.optimizers.matrix_moment import MOMENTUM, NOW, beta
from multilin.training.schedules import rate_factor
from multilin.training.settings import ScheduleRecipe

Triples = Iterator[tuple[str, np.ndarray, np.ndarray]]


def check_tscale(file: Any) -> Triples:
    """(array, ours, expected): weights and state after every step of each setting, and the schedule tables."""
    for kind in ("matrix", "row"):
        pattern = rf"{kind}\.(\w+)\.step0\.W"
        for setting in [match[1] for name in file.files if (match := re.fullmatch(pattern, name))]:
            yield from _tscale_steps(file, kind, setting)
    for name in file.files:
        if name.startswith("schedule.") and name.endswith(".table"):
            params = file[name.replace(".table", ".params")]
            yield name, _schedule_table(file["schedule.iters"], *params.tolist()), file[name]


def _tscale_steps(file: Any, kind: str, setting: str) -> Triples:
    weight = torch.nn.Parameter(_tensor(file, f"{kind}.W0"))
    optimizer = MatrixMoment([weight], rows=kind == "row")
    for step, (rate, decay) in enumerate(zip(file[f"{setting}.step_rate"], file[f"{setting}.step_l2reg"], strict=True)):
        weight.grad = -_tensor(file, f"{kind}.delta{step}")  # the source ascends
        optimizer.param_groups[0].update(lr=float(rate), weight_decay=float(decay))
        optimizer.step()
        state = optimizer.state[weight]
        ours = {
            "W": weight.detach(),
            "AvrgDelta1": -state["momentum"],
            "RowDisp": state["second_moment"].flatten(),
            "SumWeight": state["weight"],
        }
        for name, tensor in ours.items():
            yield f"{kind}.{setting}.step{step}.{name}", tensor.numpy(), file[f"{kind}.{setting}.step{step}.{name}"]


def _schedule_table(steps: np.ndarray, rate: float, slow: float, tail: float, max_steps: float) -> np.ndarray:
    """Columns rate, beta1, disp_decay, w0, w1."""
    recipe = ScheduleRecipe(name="tail" if tail else "constant", warmup_steps=int(slow), tail=tail or None)
    factors = [rate_factor(recipe, int(step), max_steps=max(int(max_steps), 1)) for step in steps]
    betas = beta(torch.from_numpy(steps).double()).tolist()
    return np.array([[rate * factor, b, b, NOW, MOMENTUM] for factor, b in zip(factors, betas, strict=True)])


def check_threelin(file: Any) -> Triples:
    """(array, ours, expected): the weights after every step; W0 is where they start."""
    for name in file.files:
        if match := re.fullmatch(r"(matrix|combiner|rows)\.(?:(\w+)\.)?W1", name):
            yield from _threelin_steps(file, match[1], match[2])


def _threelin_steps(file: Any, kind: str, order: Any) -> Triples:
    prefix = f"{kind}.{order}" if order else kind
    weight = torch.nn.Parameter(_tensor(file, _first_of(file, f"{prefix}.W0", f"{kind}.W0")))
    optimizer = NormalizedSGD([weight], lr=_rate(file), rows=kind == "rows", **({"row_order": order} if order else {}))
    step = 1
    while f"{prefix}.W{step}" in file.files:
        weight.grad = _gradient(file, prefix, kind, step - 1)
        optimizer.step()
        yield f"{prefix}.W{step}", weight.detach().numpy().copy(), file[f"{prefix}.W{step}"]
        step += 1


def _gradient(file: Any, prefix: str, kind: str, step: int) -> Tensor:
    """One array for each step, or all of them in one."""
    for letter in ("G", "grad", "g"):
        for owner in (prefix, kind):
            if f"{owner}.{letter}{step}" in file.files:
                return _tensor(file, f"{owner}.{letter}{step}")
            if f"{owner}.{letter}" in file.files:
                return _tensor(file, f"{owner}.{letter}")[step]
    raise KeyError(f"{kind}: the file has no gradient of step {step} under a known name")


def _rate(file: Any) -> float:
    return float(file["lr"]) if "lr" in file.files else 0.05


def _first_of(file: Any, *names: str) -> str:
    return next(name for name in names if name in file.files)


def _tensor(file: Any, name: str) -> Tensor:
    return torch.from_numpy(file[name]).double()
