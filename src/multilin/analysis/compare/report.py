"""The report of a comparison: an HTML file that needs no network, Markdown, and the figures as JSON."""

import dataclasses
import functools
import statistics
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from multilin.analysis.compare.answers import (
    AXES,
    UNITS,
    amount,
    budget_text,
    chance_text,
    cost_sentence,
    difference_text,
    interval_text,
    p_text,
    score_text,
    share_text,
)
from multilin.analysis.compare.record import Comparison, RowRecord, RunRecord, score_of
from multilin.analysis.compare.statistics import LEVEL, Difference
from multilin.analysis.compare.verdict import (
    CERTAINTY,
    EQUAL,
    at_cell,
    caveats,
    compute_cell,
    mean_course,
    verdict_cell,
    verdict_on,
    verdict_sentences,
)
from multilin.analysis.templates import asset, render
from multilin.errors import plural
from multilin.files import write_whole
from multilin.settings.inputs import to_json, to_yaml

RESULT_FILE, MARKDOWN_FILE, REPORT_FILE = "comparison.json", "comparison.md", "comparison.html"
REPORT_FILES = (RESULT_FILE, MARKDOWN_FILE, REPORT_FILE)
COLUMNS: dict[str, Callable[[Comparison, RowRecord], str]] = {
    "row": lambda c, row: row.name,
    "validation": lambda c, row: score_text(c, row) if row.score else "failed",
    "verdict": verdict_cell,
    **{f"at {equal}": functools.partial(at_cell, axis=axis) for axis, equal in EQUAL.items()},
    "compute for the same score": compute_cell,
    "nats per token": lambda c, row: (
        f"{statistics.fmean(run.result.loss for run in row.finished):.3f}" if row.score else ""
    ),
    "parameters": lambda c, row: amount(row.parameters),
    "without embeddings": lambda c, row: amount(row.parameters - row.embedding_parameters),
    "FLOPs per token": lambda c, row: amount(row.flops_per_token),
    "training tokens": lambda c, row: amount(row.max_steps * row.tokens_per_step),
    "training seconds": lambda c, row: "" if row.seconds is None else f"{row.seconds:,.1f}",
    "training tokens/s": lambda c, row: f"{row.tokens_per_second:,.0f}" if row.tokens_per_second else "",
    "generation tokens/s": lambda c, row: f"{row.decoding[-1].tokens_per_second:,.0f}" if row.decoding else "",
    "state": lambda c, row: decimal(row.decoding[-1].state_bytes) if row.decoding else "",
}
SHORT = {equal: functools.partial(at_cell, axis=axis, is_short=True) for axis, equal in EQUAL.items()}


def write_reports(comparison: Comparison, folder: Path) -> None:
    """Write comparison.json, comparison.md and comparison.html into a folder."""
    write_whole(folder / RESULT_FILE, as_json(comparison))
    write_whole(folder / MARKDOWN_FILE, as_markdown(comparison))
    write_whole(folder / REPORT_FILE, as_html(comparison))


def as_json(comparison: Comparison) -> str:
    """The whole comparison as JSON."""
    found = [verdict_on(comparison, row.name) for row in comparison.rows]
    verdicts = [dataclasses.asdict(verdict) for verdict in found if verdict is not None]
    values = {"answers": answers(comparison), "verdicts": verdicts, **dataclasses.asdict(comparison)}
    return to_json(values, indent=1, ensure_ascii=False) + "\n"


def answers(comparison: Comparison) -> dict[str, str]:
    """The verdict, and the cost to run the models."""
    return {"verdict": verdict_sentences(comparison), "cost": cost_sentence(comparison)}


def columns_of(comparison: Comparison) -> list[str]:
    """The columns of the report's table, without the column at an equal budget, which would repeat the verdict."""
    return [name for name in COLUMNS if name not in [f"at {EQUAL[kind]}" for kind in comparison.budget]]


def table(comparison: Comparison, columns: Collection[str]) -> list[list[str]]:
    """The cells of the table of rows, the best row first; a task adds a row for chance."""
    rows = [[(COLUMNS | SHORT)[name](comparison, row) for name in columns] for row in comparison.ordered]
    if comparison.chance is not None:
        chance = {"row": "chance", "validation": chance_text(comparison)}
        rows.append([chance.get(name, "") for name in columns])
    return rows


def as_markdown(comparison: Comparison) -> str:
    """The report as Markdown: answers, figures, samples, recipes, and the method of measuring."""
    return render("comparison.md.jinja", **_content(comparison))


def as_html(comparison: Comparison) -> str:
    """The report as one HTML file with charts."""
    rows = [comparison.row(name) for name in comparison.order]
    return render(
        "comparison.html.jinja",
        **_content(comparison),
        comparison=comparison,
        unit=UNITS[comparison.measure],
        chance="" if comparison.chance is None else chance_text(comparison),
        axes=AXES,
        dots=dots(comparison) if rows else [],
        ends=("better", "worse") if comparison.measure == "bits_per_byte" else ("worse", "better"),
        failed=[row for row in comparison.rows if row.score is None],
        length=comparison.rows[0].recipe["model"]["n_positions"],
        validations=[line for row in rows for line in _validations(row, comparison.measure)],
        decoding=[
            [row.name, f"{d.context:,}", f"{d.tokens_per_second:,.1f}", f"{d.state_bytes:,}"]
            for row in rows
            for d in row.decoding
        ],
        data=_chart_data(comparison, rows),
        css=asset("comparison.css"),
        js=asset("comparison.js"),
        uplot_css=asset("uPlot.min.css"),
        uplot_js=asset("uPlot.iife.min.js"),
    )


def _content(comparison: Comparison) -> dict[str, Any]:
    """The texts and tables that the Markdown and the HTML report share."""
    rows = comparison.ordered
    texts = [row.recipe["data"] for row in comparison.rows]
    sources = dict.fromkeys(name for data in texts for name in data["mix"] or [data["source"]])
    seeds = f"{plural(len(comparison.rows), 'row')}, {plural(len(comparison.seeds), 'seed')} each"
    measured = render(
        "measured.txt.jinja", comparison=comparison, budget=budget_text(comparison), level=LEVEL,
        chance=chance_text(comparison),
    )  # fmt: skip
    return {
        "title": comparison.title,
        "summary": f"{seeds}, {budget_text(comparison)} per run, on {comparison.task or ', '.join(sources)}.",
        "answers": answers(comparison),
        "caveats": list(caveats(comparison)),
        "columns": columns_of(comparison),
        "cells": table(comparison, columns_of(comparison)),
        "difference_columns": ["row", "against", "difference", "per cent", "95 % interval", "p", "verdict"],
        "differences": [_difference(comparison, difference) for difference in comparison.differences if len(rows) > 2],
        "runs": [_run(run) for row in rows for run in row.all_runs],
        "prompt": comparison.prompt,
        "samples": {row.name: row.sample for row in rows if row.sample},
        "measured": measured.split("\n"),
        "recipes": {row.name: to_yaml(row.recipe) for row in rows},
    }


def _difference(comparison: Comparison, difference: Difference) -> list[str]:
    meaning = difference.unknown or CERTAINTY[difference.within_noise]
    p = "" if difference.p is None else p_text(difference.p)
    figures = [difference_text(comparison, difference), share_text(difference), interval_text(comparison, difference)]
    return [difference.one, difference.other, *figures, p, meaning]


def _run(run: RunRecord) -> list[str]:
    if run.failure or not run.course:
        return [run.folder, str(run.seed), "failed", "", "", run.failure or ""]
    last = run.result
    half = " (final half)" if run.final else ""
    result = f"{last.bits_per_byte:.4f}{half}" if last.accuracy is None else f"{100 * last.accuracy:.2f} %"
    return [run.folder, str(run.seed), result, f"{last.tokens:,}", f"{last.seconds:,.1f}", ""]


def _validations(row: RowRecord, measure: str) -> Iterator[list[str]]:
    for point in mean_course(row, measure):
        figures = [f"{point[name]:.4f}" for name in (measure, "low", "high")]
        yield [row.name, f"{point['tokens']:,.0f}", f"{point['seconds']:,.1f}", amount(point["flops"]), *figures]


def _chart_data(comparison: Comparison, rows: list[RowRecord]) -> dict[str, Any]:
    return {
        "measure": comparison.measure,
        "axes": AXES,
        "axis": next(iter(comparison.budget)),
        "chance": comparison.chance,
        "rows": [
            {
                "name": row.name,
                "colour": row.colour,
                "course": mean_course(row, comparison.measure),
                "score": row.score.mean if row.score else None,
                "memory": row.memory,
                "decoding": [dataclasses.asdict(figures) for figures in row.decoding],
            }
            for row in rows
        ],
    }


def dots(comparison: Comparison) -> list[dict[str, Any]]:
    """The first chart: the seeds, mean and spread of every row, and chance, as positions from 0 to 100 on the axis."""
    rows = [comparison.row(name) for name in comparison.order]
    scores = {row.name: [score_of(run, comparison.measure) for run in row.finished] for row in rows}
    bars = {row.name: (row.score.mean, row.score.deviation or 0.0) for row in rows if row.score}
    ends = [score for seeds in scores.values() for score in seeds]
    ends += [] if comparison.chance is None else [comparison.chance]
    ends += [mean + way * deviation for mean, deviation in bars.values() for way in (-1, 1)]
    room = (max(ends) - min(ends)) * 0.04 or abs(max(ends)) * 0.01 or 1.0
    low, high = min(ends) - room, max(ends) + room

    def place(value: float) -> float:
        return round(100 * (value - low) / (high - low), 3)

    return [
        {
            "name": row.name,
            "colour": row.colour,
            "chance": None if comparison.chance is None else place(comparison.chance),
            "text": score_text(comparison, row),
            "verdict": verdict_cell(comparison, row),
            "is_best": [row.name] == comparison.best,
            "seeds": [place(score) for score in scores[row.name]],
            "mean": place(mean),
            "from": place(mean - deviation),
            "width": place(mean + deviation) - place(mean - deviation),
        }
        for row, (mean, deviation) in zip(rows, bars.values(), strict=True)
    ]
