"""A progress line on stderr for work of more than a moment, so that stdout carries results alone.

Where stderr is no terminal nothing is shown: there only results and failures are of use.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn

MEGABYTE = 1e6


@contextmanager
def counted(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar while the block runs; call the result with how many of `total` are done."""
    with _progress(BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeRemainingColumn()) as progress:
        task = progress.add_task(description, total=total)
        yield lambda done: progress.update(task, completed=done)


@contextmanager
def staged() -> Iterator[Callable[[str, int], None]]:
    """Show what is being done and how many bytes of text it has read; call the result with both."""
    with _progress(TextColumn("{task.fields[megabytes]:.1f} MB")) as progress:
        task = progress.add_task("reading", total=None, megabytes=0.0)
        yield lambda stage, count: progress.update(task, description=stage, megabytes=count / MEGABYTE)


def _progress(*columns: ProgressColumn) -> Progress:
    console = Console(stderr=True)
    description = TextColumn("{task.description}")
    return Progress(description, *columns, console=console, transient=True, disable=not console.is_terminal)
