"""The results of a benchmark in files: rows as JSON, with machine, versions and arguments, and a plot."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import _machine
from multilin.files import atomic_file, check_writable, write_whole
from multilin.settings.inputs import to_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Rows = Sequence[dict[str, Any]]


def parse(
    parser: argparse.ArgumentParser, argv: list[str], *, draws: bool = False, threads: bool = False, clock: bool = False
) -> argparse.Namespace:
    """The arguments of a benchmark, with `--json`, `--plot` if it draws, and `--threads` and `--clock` on request.

    Sets PyTorch's number of threads; 1 for `--clock cpu`.

    Args:
        parser: the benchmark's own options.
        argv: the command line arguments.
        draws: add `--plot`.
        threads: add `--threads`.
        clock: add `--threads` and `--clock`.

    Raises:
        InputError: a file cannot be written.
    """
    parser.add_argument("--json", metavar="FILE", help="file to write the figures to")
    if draws:
        parser.add_argument("--plot", metavar="FILE", help="file to draw the figures into, .png or .svg")
    threads = threads or clock
    if threads:
        parser.add_argument("--threads", type=int, help="number of threads; 1 gives steadier figures on a busy machine")
    if clock:
        parser.add_argument("--clock", default="wall", choices=["wall", "cpu"], help="cpu: CPU time of one thread")
    arguments = parser.parse_args(argv)
    for name in ("json", "plot"):
        if path := getattr(arguments, name, None):
            check_writable(f"--{name}", path)
    if clock and arguments.clock == "cpu":
        arguments.threads = 1
    if threads and arguments.threads:
        torch.set_num_threads(arguments.threads)
    return arguments


def save(
    name: str,
    arguments: argparse.Namespace,
    rows: Rows,
    draw: Callable[[Rows, argparse.Namespace], "Figure"] | None = None,
) -> None:
    """Write the files that `--json` and `--plot` name."""
    if arguments.json:
        save_json(arguments.json, {"name": name, "arguments": vars(arguments)}, {"rows": rows})
    if draw is not None and arguments.plot:
        with atomic_file(arguments.plot) as partial:
            draw(rows, arguments).savefig(partial, format=Path(arguments.plot).suffix[1:] or "png")


def save_json(path: str | Path, asked: dict[str, Any], results: dict[str, Any]) -> None:
    """Write the arguments, the machine and the results."""
    depends_on = {**_machine.description(), "threads": torch.get_num_threads()}
    write_whole(path, to_json({**asked, **depends_on, **results}, indent=2, default=str) + "\n")
