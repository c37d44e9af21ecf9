"""Scores as compact tables, and as plain data: of a text and its parts, and of lm-eval's tasks."""

import dataclasses
import importlib.util
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from multilin.analysis.breakdown import FEWEST_BYTES, NUM_EXTREMES, Breakdown, Part
from multilin.errors import InputError
from multilin.inference.runs import Run

QUANTILES = (0.1, 0.5, 0.9)
OPENING_CHARACTERS = 40


def as_data(found: Breakdown) -> dict[str, Any]:
    """The score, and of every list its parts; of the documents their number, spread and extremes."""
    return dataclasses.asdict(found.evaluation) | {
        "by_position": [_data(part) for part in found.by_position],
        "by_document": _documents(found),
        "by_class": [_data(part) for part in found.by_class],
        "by_frequency": [_data(part) for part in found.by_frequency],
    }


def print_breakdown(found: Breakdown, console: Console) -> None:
    """The whole, then a table for each way of sorting the tokens."""
    whole = found.evaluation
    console.print(
        f"[bold]{whole.bits_per_byte:.4f} bits per byte[/bold], {whole.loss:.4f} nats per token, perplexity "
        f"{whole.perplexity:,.2f}; {whole.tokens:,} tokens, {whole.bytes:,} bytes"
    )
    for title, parts in (
        ("tokens read before", found.by_position),
        ("kind of token", found.by_class),
        ("frequency in this text", found.by_frequency),
    ):
        console.print()
        console.print(_table(title, parts, whole.tokens))
    console.print()
    _print_documents(found, console)


def score_tasks(
    run: Run,
    tasks: str,
    folder: str | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    *,
    trust_task_code: bool = False,
) -> dict[str, Any]:
    """Scores on tasks of lm-eval, whose names are separated by commas: {task: {metric: {"value", "standard_error"}}}.

    Raises:
        InputError: lm-eval is not installed, or as `evaluate_tasks`.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise InputError("tasks: lm-eval is not installed; `pip install 'lm-eval>=0.4.9'` installs it")
    from multilin.analysis.harness import evaluate_tasks

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names:
        raise InputError(f"tasks: {tasks!r} given, but it should be names of lm-eval tasks, separated by commas")
    found: dict[str, Any] = {}
    for score in evaluate_tasks(
        run, names, folder=folder, trust_task_code=trust_task_code, limit=limit, batch_size=batch_size
    ):
        found.setdefault(score.task, {})[score.metric] = {"value": score.value, "standard_error": score.spread}
    return found


def print_tasks(found: dict[str, Any], console: Console) -> None:
    """A line for each metric of each task."""
    table = Table(box=None, pad_edge=False)
    for column in ("task", "metric", "value", "standard error"):
        table.add_column(column, justify="left" if column in ("task", "metric") else "right")
    for task, metrics in found.items():
        for metric, score in metrics.items():
            spread = score["standard_error"]
            table.add_row(task, metric, f"{score['value']:.4f}", "" if spread is None else f"{spread:.4f}")
    console.print(table)


def _table(title: str, parts: Sequence[Part], num_tokens: int) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in (title, "bits per byte", "nats per token", "share of tokens"):
        table.add_column(column, justify="left" if column == title else "right")
    for part in parts:
        bits = f"{part.bits_per_byte:.3f}" if part.bytes else "-"
        table.add_row(part.name, bits, f"{part.loss:.3f}", f"{100 * part.tokens / num_tokens:.1f} %")
    return table


def _print_documents(found: Breakdown, console: Console) -> None:
    ordered = found.documents_by_score()
    if not ordered:
        console.print(f"{len(found.by_document):,} documents, none of at least {FEWEST_BYTES} bytes")
        return
    low, middle, high = _quantiles(ordered)
    console.print(
        f"{len(found.by_document):,} documents, {len(ordered):,} of them of at least {FEWEST_BYTES} bytes: median "
        f"{middle:.3f} bits per byte, eight in ten between {low:.3f} and {high:.3f}"
    )
    table = Table(box=None, pad_edge=False)
    for column in ("", "document", "bits per byte", "bytes", "begins with"):
        table.add_column(column, justify="right" if column in ("document", "bits per byte", "bytes") else "left")
    for name, parts in zip(("best", "worst"), _extremes(ordered), strict=True):
        for part in parts:
            opening = Text(found.openings[part.name][:OPENING_CHARACTERS])
            table.add_row(name, part.name, f"{part.bits_per_byte:.3f}", f"{part.bytes:,.0f}", opening)
    console.print(table)


def _documents(found: Breakdown) -> dict[str, Any]:
    ordered = found.documents_by_score()
    shown = {"number": len(found.by_document), "long_enough": len(ordered), "fewest_bytes": FEWEST_BYTES}
    if not ordered:
        return shown
    best, worst = (
        [_data(part) | {"begins_with": found.openings[part.name]} for part in parts] for parts in _extremes(ordered)
    )
    quantiles = dict(zip(map(str, QUANTILES), _quantiles(ordered), strict=True))
    return shown | {"bits_per_byte_quantiles": quantiles, "best": best, "worst": worst}


def _extremes(ordered: list[Part]) -> tuple[list[Part], list[Part]]:
    """The best, the best first, and of the others the worst, the worst first."""
    return ordered[:NUM_EXTREMES], ordered[NUM_EXTREMES:][-NUM_EXTREMES:][::-1]


def _quantiles(parts: list[Part]) -> list[float]:
    return [float(value) for value in np.quantile([part.bits_per_byte for part in parts], QUANTILES)]


def _data(part: Part) -> dict[str, Any]:
    return {
        "name": part.name,
        "tokens": part.tokens,
        "bytes": part.bytes,
        "nats": part.nats,
        "loss": part.loss,
        "bits_per_byte": part.bits_per_byte if part.bytes else None,
    }
