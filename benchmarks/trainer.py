"""What training through a recipe costs beside the work itself.

The peer is a bare PyTorch loop over the same model, optimizer and batches, which lie in memory: nothing is loaded,
logged or scheduled. Both take turns of a few steps in one process, so that whatever slows the machine slows both. Ours
is timed from turn to turn: data loading, the callbacks, metrics.jsonl and the display are inside; validation and
checkpoints, which happen once in many steps, are not.

With `--processes 2` torchrun starts two, which share each step, and the peer is the bare loop over PyTorch's
DistributedDataParallel.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import default_collate

from benchmarks import _results
from benchmarks._models import add_sizes
from benchmarks._processes import start_together
from benchmarks._turns import synchronize
from multilin.cli.progress import TrainingDisplay
from multilin.training.assemble import build_model, read_text, training_order
from multilin.training.loop import train
from multilin.training.precision import autocast_dtype
from multilin.training.processes import accelerator_or_cpu, join_processes, num_processes, rank
from multilin.training.recipe import Recipe, load_recipe
from multilin.training.resolve import resolve_recipe

TURNS_TO_WARM_UP = 2


class BareLoop:
    """Training with nothing around it."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        text = read_text(recipe)
        self.device = accelerator_or_cpu()
        self.model: Any = build_model(recipe, text).to(self.device).train()
        order = training_order(recipe, self.model, text)
        size = recipe.training.split(num_processes())[0]
        batches = [default_collate([order[step * size + row] for row in range(size)]) for step in range(8)]
        if num_processes() > 1:
            self.model = DistributedDataParallel(self.model)
        self.batches = [{name: value.to(self.device) for name, value in batch.items()} for batch in batches]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def run(self, steps: int) -> float:
        """Seconds for so many steps."""
        dtype = autocast_dtype(self.recipe.training.precision)
        synchronize()
        start = time.perf_counter()
        for step in range(steps):
            with torch.autocast(self.device.type, dtype, enabled=dtype is not None):
                loss = self.model(**self.batches[step % len(self.batches)]).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
        synchronize()
        return time.perf_counter() - start


class TakeTurns:
    """Times every turn of ours, and lets the peer have one after it."""

    def __init__(self, peer: BareLoop, steps: int) -> None:
        self.peer, self.steps = peer, steps
        self.ours: list[float] = []
        self.bare: list[float] = []
        self._start: float | None = None

    def __call__(self, step: int, model: object) -> None:
        """At the start of a turn: note how long the last one took, and let the peer go."""
        if (step - 1) % self.steps:
            return
        synchronize()
        if self._start is not None:
            self.ours.append(time.perf_counter() - self._start)
            self.bare.append(self.peer.run(self.steps))
        self._start = time.perf_counter()


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks trainer", description=__doc__)
    parser.add_argument("--architecture", default="additive")
    add_sizes(parser, hidden_size=256, num_layers=6)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--precision", default="auto", choices=["auto", "float32", "bf16"])
    parser.add_argument("--steps", type=int, default=5, help="steps of one turn")
    parser.add_argument("--turns", type=int, default=15, help="turns of each")
    parser.add_argument("--processes", type=int, default=1, help="that train together")
    parser.add_argument("--folder", type=Path, help="where the run is written; a temporary one by default")
    arguments = _results.parse(parser, argv, threads=True)
    if arguments.processes > num_processes():
        start_together("benchmarks.trainer", arguments.processes, argv)
        return
    join_processes()
    with tempfile.TemporaryDirectory() as folder:
        recipe = _recipe(arguments, (arguments.folder or Path(folder)) / "run")
        turns = TakeTurns(BareLoop(recipe), arguments.steps)
        with TrainingDisplay() as display:
            train(recipe, before_step=turns, progress=display)
    if rank() != 0:
        return
    ours, bare = turns.ours[TURNS_TO_WARM_UP:], turns.bare[TURNS_TO_WARM_UP:]
    tokens = arguments.steps * arguments.batch_size * recipe.model.n_positions
    cost = statistics.median(one / other - 1 for one, other in zip(ours, bare, strict=True))
    print(f"{arguments.architecture}, width {arguments.hidden_size}, {arguments.num_layers} layers, ", end="")
    print(f"{recipe.training.precision}, {arguments.batch_size} x {recipe.model.n_positions} tokens a step, ", end="")
    print(f"{arguments.processes} {'process' if arguments.processes == 1 else 'processes'}")
    print(f"{'':24}{'ms/step':>10}{'tokens/s':>12}")
    rows = []
    for name, seconds in (("multilin train", ours), ("peer: bare loop", bare)):
        median = statistics.median(seconds)
        print(f"{name:24}{1e3 * median / arguments.steps:10.2f}{tokens / median:12,.0f}")
        rows.append({"name": name, "seconds_per_step": median / arguments.steps, "tokens_per_second": tokens / median})
    print(f"cost of everything around the work: {100 * cost:.1f} % of a step (median over {len(ours)} pairs of turns)")
    _results.save("trainer", arguments, [*rows, {"name": "cost", "share_of_a_step": cost}])


def _recipe(arguments: argparse.Namespace, output: Path) -> Recipe:
    overrides = {
        "model.architecture": arguments.architecture,
        "model.hidden_size": arguments.hidden_size,
        "model.num_layers": arguments.num_layers,
        "training.batch_size": arguments.batch_size,
        "training.global_batch_size": arguments.batch_size,
        "training.precision": arguments.precision,
        "training.max_steps": arguments.steps * (arguments.turns + TURNS_TO_WARM_UP + 1),
        "training.eval_every_steps": 0,
        "training.eval_max_tokens": 1000,
        "training.save_every_steps": 0,
        "output": str(output),
    }
    return resolve_recipe(load_recipe(None, overrides))


if __name__ == "__main__":  # torchrun
    main(sys.argv[1:])
