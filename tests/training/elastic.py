"""A process of a run that several share, noting the blocks it reads and stopping as told; `run_on` starts it."""

import contextlib
import json
import os
import signal
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from tests.processes import run, torchrun


def run_on(number: int, *words: Path | str, options: tuple[str, ...] = (), status: int = 0) -> str:
    """Train recipes, one after the other, in so many processes.

    Args:
        number: of processes.
        words: files of recipes; "resume"; SIGNAL:STEP:RANK, sent to the process of that rank, or to "torchrun", when
            the step begins.
        options: of torchrun.
        status: expected of torchrun.
    """
    command = [*torchrun(number, *options), "-m", "tests.training.elastic", *map(str, words)]
    return run(command, environment={**os.environ, "OMP_NUM_THREADS": "1"}, status=status)


def note_blocks(file: Path) -> None:
    """Have every pass of this process add its step, from 0, and its blocks to a file."""
    from multilin.training import loop

    original = loop.step_batches

    def step_batches(order: Any, plan: Any, step: int, device: Any) -> Any:
        batches = original(order, plan, step, device)
        with file.open("a") as stream:
            for batch in batches:
                stream.write(json.dumps([step - 1, batch["input_ids"].tolist()]) + "\n")
        return batches

    loop.step_batches = step_batches


def blocks_of_steps(folder: Path) -> dict[int, list[list[int]]]:
    """The blocks that all processes read for each step, sorted."""
    steps = defaultdict(list)
    for file in folder.glob("*.blocks"):
        for line in file.read_text().splitlines():
            step, blocks = json.loads(line)
            steps[step] += blocks
    return {step: sorted(blocks) for step, blocks in sorted(steps.items())}


def main() -> None:
    """Train the recipes among the arguments."""
    from multilin.training.loop import train
    from multilin.training.outcomes import TrainingInterrupted
    from multilin.training.recipe import load_recipe

    def send(begun: int, model: Any) -> None:
        for name, step, rank in (word.split(":") for word in sys.argv[2:] if ":" in word):
            is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
            receiver = os.getppid() if rank == "torchrun" else os.getpid()
            if begun == int(step) and os.environ["RANK"] == rank.replace("torchrun", "0") and is_first:
                os.kill(receiver, signal.Signals[name])

    for file in (Path(word) for word in sys.argv[1:] if word.endswith(".yaml")):
        note_blocks(file.with_name(f"{file.stem}-{os.getpid()}.blocks"))
        with contextlib.suppress(TrainingInterrupted):
            train(load_recipe(file), resume="resume" in sys.argv, before_step=send)


if __name__ == "__main__":
    main()
