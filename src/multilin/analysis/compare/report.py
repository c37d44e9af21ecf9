"""The report of a comparison: one HTML file that needs no network, the same as Markdown, and the figures as JSON."""

import dataclasses
import json
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from multilin.analysis.compare.answers import AXES, best_sentence, cost_sentence, mean_course, speed_sentence
from multilin.analysis.compare.markdown import as_markdown
from multilin.analysis.compare.record import Comparison, RowRecord
from multilin.analysis.compare.view import (
    COLUMNS,
    HEADINGS,
    cells,
    chart_data,
    differences,
    dots,
    ends,
    how_measured,
    run_cells,
)
from multilin.analysis.compare.words import REPORT_FILE, UNITS, amount, budget_text
from multilin.errors import plural
from multilin.files import write_whole
from multilin.settings.inputs import to_yaml

JSON_FILE, MARKDOWN_FILE = "comparison.json", "comparison.md"
REPORT_FILES = (JSON_FILE, MARKDOWN_FILE, REPORT_FILE)
_ASSETS = resources.files("multilin.analysis") / "assets"


def write_reports(comparison: Comparison, folder: Path) -> None:
    """Write comparison.json, comparison.md and comparison.html into a folder."""
    write_whole(folder / JSON_FILE, as_json(comparison))
    write_whole(folder / MARKDOWN_FILE, as_markdown(comparison))
    write_whole(folder / REPORT_FILE, as_html(comparison))


def as_json(comparison: Comparison) -> str:
    """The whole comparison as JSON."""
    return json.dumps(dataclasses.asdict(comparison), indent=1, ensure_ascii=False) + "\n"


def as_html(comparison: Comparison) -> str:
    """The report as one HTML file, charts and all."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    rows = [comparison.row(name) for name in comparison.order]
    failed = [row for row in comparison.rows if row.score is None]
    return environment.from_string(_asset("comparison.html.jinja")).render(
        comparison=comparison,
        summary=_summary(comparison),
        headings=HEADINGS,
        answers=[best_sentence(comparison), speed_sentence(comparison), cost_sentence(comparison)],
        unit=UNITS[comparison.measure],
        axes=AXES,
        dots=dots(comparison) if rows else [],
        ends=ends(comparison),
        failed=failed,
        length=comparison.rows[0].recipe["model"]["n_positions"],
        columns=[name for name, _ in COLUMNS],
        cells=[cells(comparison, row) for row in [*rows, *failed]],
        differences=list(differences(comparison)),
        validations=[line for row in rows for line in _validations(row, comparison.measure)],
        decoding=[
            [row.name, f"{d.context:,}", f"{d.tokens_per_second:,.1f}", f"{d.state_bytes:,}"]
            for row in rows
            for d in row.decoding
        ],
        runs=[run_cells(run) for row in [*rows, *failed] for run in row.all_runs],
        samples=[(row.name, row.sample) for row in rows if row.sample],
        measured=how_measured(comparison),
        recipes=[(row.name, to_yaml(row.recipe)) for row in [*rows, *failed]],
        data=chart_data(comparison),
        **{name: _asset(file) for name, file in _PARTS.items()},
    )


_PARTS = {
    "css": "comparison.css",
    "js": "comparison.js",
    "uplot_css": "uPlot.min.css",
    "uplot_js": "uPlot.iife.min.js",
}


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _summary(comparison: Comparison) -> str:
    rows, seeds = len(comparison.rows), len(comparison.seeds)
    on: Any = comparison.task or ", ".join(dict.fromkeys(row.recipe["data"]["source"] for row in comparison.rows))
    return f"{plural(rows, 'row')}, {plural(seeds, 'seed')} each, {budget_text(comparison)} a run, on {on}."


def _validations(row: RowRecord, measure: str) -> Iterator[list[str]]:
    for point in mean_course(row, measure):
        figures = [f"{point[name]:.4f}" for name in (measure, "low", "high")]
        yield [row.name, f"{point['tokens']:,.0f}", f"{point['seconds']:,.1f}", amount(point["flops"]), *figures]
