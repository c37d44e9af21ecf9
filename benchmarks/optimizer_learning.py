"""What each optimizer makes of the same steps: validation loss of small models, every learning rate of a grid tried.

Each optimizer has the same number of learning rates, a factor of about three apart, one seed, a linear course to 0 and
the same data in the same order. Where the best lies at an end of the grid, up to two more are tried beyond it. "At
equal time" is the validation loss, read off the course of the best run, when the fastest optimizer of an architecture
has done all its steps; the learning rates of the others have not come down yet by then. The seconds of a step are
measured afterwards, the optimizers taking turns, so that they compare also where the runs shared the machine with
other work. Runs that are in the folder already are not trained again.
"""

import argparse
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks import _plots, _results
from benchmarks._models import add_sizes, train_step
from benchmarks._turns import seconds_in_turns
from multilin.training.assemble import create_network
from multilin.training.loop import train
from multilin.training.optimizers import build_optimizer
from multilin.training.outcomes import TrainingFailed
from multilin.training.recipe import load_recipe
from multilin.training.run_folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GRIDS = {
    "adamw": (1e-3, 3e-3, 1e-2, 3e-2),
    "matrix_moment": (3e-3, 1e-2, 3e-2, 1e-1),
    "normalized_sgd": (3e-2, 1e-1, 3e-1, 1.0),
}
BY_NAME_ONLY = "it trains many models"
MOST_BEYOND = 2  # rates tried beyond an end of the grid
COLOURS = {"adamw": "#4c6ef5", "matrix_moment": "#e8590c", "normalized_sgd": "#2b8a3e"}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks optimizer_learning", description=__doc__)
    parser.add_argument("--architectures", nargs="+", default=["tscale", "threelin", "additive"])
    parser.add_argument("--optimizers", nargs="+", default=list(GRIDS), choices=list(GRIDS))
    parser.add_argument("--source", default="python-docs", help="text to learn")
    parser.add_argument("--validation", help="text to validate on; without it documents of the source")
    add_sizes(parser, hidden_size=128, num_layers=4, vocab_size=4096)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--options", default="{}", help='of architectures: {"additive": {"dropout": 0}}')
    parser.add_argument("--turns", type=int, default=7, help="steps of each that are timed at the end")
    parser.add_argument("--folder", default="runs/optimizer_learning", help="where the runs go")
    arguments = _results.parse(parser, argv, draws=True)
    rows = [row for architecture in arguments.architectures for row in _rows(architecture, arguments)]
    _print(rows, arguments)
    _results.save("optimizer_learning", arguments, rows, draw)


def _rows(architecture: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The best run of each optimizer, with the seconds of its steps, and the losses with all rates."""
    runs = {optimizer: _search(architecture, optimizer, arguments) for optimizer in arguments.optimizers}
    best = {optimizer: _best_rate(by_rate) for optimizer, by_rate in runs.items()}
    steps = {name: _step(_folder(architecture, name, rate, arguments)) for name, rate in best.items()}
    seconds = seconds_in_turns(steps, arguments.turns, "wall")
    return [
        {
            "architecture": architecture,
            "optimizer": optimizer,
            "best_rate": best[optimizer],
            "losses": {rate: _finite(lines[-1]["validation_loss"]) for rate, lines in by_rate.items()},
            "seconds_per_step": seconds[optimizer],
            "tokens": [line["tokens"] for line in by_rate[best[optimizer]]],
            "validation_losses": [_finite(line["validation_loss"]) for line in by_rate[best[optimizer]]],
            "bits_per_byte": [_finite(line["validation_bits_per_byte"]) for line in by_rate[best[optimizer]]],
        }
        for optimizer, by_rate in runs.items()
    ]


def _best_rate(by_rate: dict[float, list[dict[str, Any]]]) -> float:
    return min(by_rate, key=lambda rate: by_rate[rate][-1]["validation_loss"])


def _finite(value: float) -> float | None:
    """JSON has no infinity, the loss of a training that failed."""
    return value if math.isfinite(value) else None


def _search(architecture: str, optimizer: str, arguments: argparse.Namespace) -> dict[float, list[dict[str, Any]]]:
    """Every rate of the grid, and beyond its end while the best lies there."""
    by_rate = {rate: _run(architecture, optimizer, rate, arguments) for rate in GRIDS[optimizer]}
    for _ in range(MOST_BEYOND):
        rates, best = sorted(by_rate), _best_rate(by_rate)
        if best not in (rates[0], rates[-1]):
            break
        beyond = float(f"{best / 3 if best == rates[0] else best * 3:.1g}")
        by_rate[beyond] = _run(architecture, optimizer, beyond, arguments)
    return dict(sorted(by_rate.items()))


def _run(architecture: str, optimizer: str, rate: float, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The validated lines of metrics.jsonl; infinite loss where training failed."""
    output = _folder(architecture, optimizer, rate, arguments)
    if not (output / "README.md").is_file():
        recipe = load_recipe(
            None,
            {
                "model.architecture": architecture,
                "model.hidden_size": arguments.hidden_size,
                "model.num_layers": arguments.num_layers,
                "model.n_positions": arguments.length,
                "model.options": json.loads(arguments.options).get(architecture, {}),
                "data.source": arguments.source,
                "data.validation": arguments.validation,
                "tokenizer.vocab_size": arguments.vocab_size,
                "optimizer.name": optimizer,
                "optimizer.learning_rate": rate,
                "schedule.name": "linear",
                "schedule.warmup_steps": arguments.steps // 15,
                "training.max_steps": arguments.steps,
                "training.batch_size": arguments.batch_size,
                "training.eval_every_steps": max(arguments.steps // 12, 1),
                "training.eval_max_tokens": 50_000,
                "training.save_every_steps": 0,
                "output": str(output),
            },
        )
        try:
            train(recipe, overwrite=True)
        except TrainingFailed as failure:
            print(f"{output.name}: {failure}")
            return [{"tokens": 0, "validation_loss": math.inf, "validation_bits_per_byte": math.inf}]
    validated = [line for line in RunFolder(output).read_metrics() if "validation_loss" in line]
    print(f"{output.name:40}{validated[-1]['validation_loss']:8.3f}", flush=True)
    return validated


def _folder(architecture: str, optimizer: str, rate: float, arguments: argparse.Namespace) -> Path:
    return Path(arguments.folder) / f"{architecture}-{optimizer}-{rate:g}"


def _step(folder: Path) -> Callable[[], object]:
    """One training step on random tokens, as that run did it."""
    recipe = load_recipe(folder / "recipe.yaml")
    plan, vocab_size = recipe.training, recipe.tokenizer.vocab_size
    model = create_network(recipe, vocab_size, None).train()
    optimizer = build_optimizer(recipe.optimizer, model, decayed=())
    ids = torch.randint(vocab_size, (plan.batch_size, recipe.model.n_positions))
    clip_norm = recipe.optimizer.clip_norm or 0.0
    return partial(train_step, model, optimizer, ids, bf16=plan.precision == "bf16", clip_norm=clip_norm)


def _print(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    sizes = f"width {arguments.hidden_size}, {arguments.num_layers} layers, vocabulary {arguments.vocab_size}"
    steps = f"{arguments.steps} steps of {arguments.batch_size} x {arguments.length} tokens"
    print(f"\n{sizes}, {steps}, {arguments.source}, one seed")
    head = f"{'':30}{'best rate':>10}{'loss':>8}{'bits/byte':>11}{'ms/step':>9}{'at equal time':>15}"
    print(f"{head}  all rates: loss")
    for row in rows:
        fastest = min(other["seconds_per_step"] for other in rows if other["architecture"] == row["architecture"])
        share_done = fastest / row["seconds_per_step"]
        # Without a finite loss, each is None, which as a number is nan.
        tokens, losses, bits = (
            np.array(row[name], dtype=float) for name in ("tokens", "validation_losses", "bits_per_byte")
        )
        at_end = np.interp(tokens[-1] * share_done, tokens, losses)
        tried = ", ".join(f"{rate:g}: {math.inf if loss is None else loss:.3f}" for rate, loss in row["losses"].items())
        print(
            f"{row['architecture']:12}{row['optimizer']:18}{row['best_rate']:>10g}{losses[-1]:>8.3f}{bits[-1]:>11.3f}"
            f"{1e3 * row['seconds_per_step']:>9.0f}{at_end:>15.3f}  {tried}"
        )


def draw(rows: _results.Rows, arguments: argparse.Namespace) -> "Figure":
    """Validation bits per byte of the best runs, over tokens read and over time."""
    names = list(dict.fromkeys(row["architecture"] for row in rows))
    figure, axes = _plots.figure(2, len(names), height=3.2, share_y=True)
    for row in rows:
        optimizer, column, tokens = row["optimizer"], names.index(row["architecture"]), np.array(row["tokens"])
        steps = tokens / (arguments.batch_size * arguments.length)
        for axis, x in zip(axes[:, column], (tokens / 1e3, steps * row["seconds_per_step"]), strict=True):
            axis.plot(x, row["bits_per_byte"], color=COLOURS[optimizer], label=optimizer)
        axes[0, column].set_title(row["architecture"])
    for panels, label in zip(axes, ("thousand tokens read", "seconds of training steps"), strict=True):
        panels[0].set_ylabel("bits per byte, validation")
        for axis in panels:
            axis.set_xlabel(label)
    axes[0, 0].legend(frameon=False)
    return figure
