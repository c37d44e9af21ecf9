"""How long a checkpoint stops training: written in the background, as FSDP2 runs do, and waited for.

Two processes train a model that is divided among them. Every checkpoint is timed from the end of the step before it
until the next step may begin; every second one is waited for until it is complete, which is what a synchronous
checkpoint costs. The limit is copying the same bytes in memory once, as they may change when training goes on.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import _results
from benchmarks._models import add_sizes
from benchmarks._processes import start_together
from multilin.training.loop import train
from multilin.training.processes import join_processes, num_processes, rank, wait_for_all
from multilin.training.recipe import load_recipe
from multilin.training.saving import Saver

PROCESSES = 2
TO_WARM_UP = 2  # checkpoints: the first copies need new memory


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks checkpoints", description=__doc__)
    add_sizes(parser, hidden_size=512, num_layers=8, vocab_size=8192)
    parser.add_argument("--turns", type=int, default=7, help="checkpoints of each kind")
    parser.add_argument("--folder", type=Path, help="where the run is written; set by this benchmark itself")
    arguments = _results.parse(parser, argv)
    if num_processes() < PROCESSES:
        start_together("benchmarks.checkpoints", PROCESSES, argv)
        return
    join_processes()
    times = _time_checkpoints(arguments, arguments.folder / "run")
    if rank() == 0:
        _report(arguments, times)


def _time_checkpoints(arguments: argparse.Namespace, output: Path) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {"in the background": [], "waited for": [], "limit: one copy": []}
    write = Saver.write_checkpoint

    def timed(saver: Saver, progress: dict[str, Any]) -> None:
        saver.finish()  # the one before
        wait_for_all()
        times["limit: one copy"].append(_copy(saver))
        waits = len(times["in the background"]) > len(times["waited for"])
        begin = time.perf_counter()
        write(saver, progress)
        if waits:
            saver.finish()
        times["waited for" if waits else "in the background"].append(time.perf_counter() - begin)

    Saver.write_checkpoint = timed  # type: ignore[method-assign]
    try:
        train(load_recipe(None, _changes(arguments, output)))
    finally:
        Saver.write_checkpoint = write  # type: ignore[method-assign]
    return {name: values[TO_WARM_UP:] for name, values in times.items()}


def _copy(saver: Saver) -> float:
    """Seconds to copy what this process keeps of the weights and of the optimizer, into memory that was used before."""
    states = saver.optimizer.state.values()
    tensors = [*saver.model.parameters(), *(value for slots in states for value in slots.values())]
    parts = [x.to_local() if hasattr(x, "to_local") else x for x in tensors if torch.is_tensor(x)]
    copies = [torch.zeros_like(part) for part in parts]
    begin = time.perf_counter()
    for copy, part in zip(copies, parts, strict=True):
        copy.copy_(part.detach())
    return time.perf_counter() - begin


def _report(arguments: argparse.Namespace, times: dict[str, list[float]]) -> None:
    print(f"additive, width {arguments.hidden_size}, {arguments.num_layers} layers, {PROCESSES} processes, AdamW")
    rows = [{"name": name, "seconds": statistics.median(values)} for name, values in times.items()]
    for row in rows:
        print(f"{row['name']:24}{1e3 * row['seconds']:10.1f} ms")
    share = rows[0]["seconds"] / rows[1]["seconds"]
    print(f"in the background over waited for: {100 * share:.1f} %")
    _results.save("checkpoints", arguments, [*rows, {"name": "share", "share": share}])


def _changes(arguments: argparse.Namespace, output: Path) -> dict[str, Any]:
    return {
        "model.hidden_size": arguments.hidden_size,
        "model.num_layers": arguments.num_layers,
        "model.n_positions": 64,
        "tokenizer.vocab_size": arguments.vocab_size,
        "training.batch_size": 1,
        "training.shard": "fsdp",
        "training.max_steps": 2 * (arguments.turns + TO_WARM_UP),
        "training.save_every_steps": 1,
        "training.keep_checkpoints": 1,
        "training.eval_every_steps": 0,
        "training.eval_max_tokens": 1000,
        "output": str(output),
    }


if __name__ == "__main__":  # torchrun
    main(sys.argv[1:])
