"""The files of an explanation: one page that opens offline, a picture, and JSON."""

import importlib.resources
import io
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from multilin.analysis.explain.data import as_json, page_data
from multilin.analysis.explain.run import Report
from multilin.analysis.explain.words import MEANINGS, others, what_is_shown
from multilin.errors import plural
from multilin.files import check_folder, write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = 120  # characters in a line of the picture
LINE_INCHES = 0.26
SHADES = 256
LINES = 40  # of text that a panel of the picture shows


def write_files(report: Report, folder: Path) -> list[Path]:
    """Write explain.html, explain.png and explain.json, each beside its place and renamed."""
    check_folder("--output", folder).mkdir(exist_ok=True)
    contents: dict[str, str | bytes] = {"html": page(report), "png": picture(report), "json": as_json(report)}
    paths = []
    for suffix, content in contents.items():
        paths.append(folder / f"explain.{suffix}")
        write_whole(paths[-1], content)
    return paths


def page(report: Report) -> str:
    """The page, with everything it shows inside."""
    from jinja2 import Environment

    template = importlib.resources.files("multilin.analysis").joinpath("assets/explain.html.jinja")
    found = Environment(autoescape=True).from_string(template.read_text(encoding="utf-8"))
    return found.render(
        run=report.name,
        source=report.source,
        size=plural(len(report.tokens) - 1, "token"),
        finding=what_is_shown(report.explanation),
        meaning=MEANINGS,
        data=page_data(report),
    )


def picture(report: Report) -> bytes:
    """A PNG: the text coloured by what its last position read, and by the effect of each token's removal on it."""
    from matplotlib.figure import Figure

    panels = _panels(report)
    lines = _lines([text for _, text in report.characters])
    height = sum(min(len(lines), LINES) * LINE_INCHES + 1.1 for _ in panels) + 0.6
    figure = Figure(figsize=(10.5, height), layout="constrained")
    figure.suptitle(f"What {report.name} read", fontsize=12, fontweight="bold")
    for axes, (title, values) in zip(np.atleast_1d(figure.subplots(len(panels))), panels, strict=True):
        _draw(axes, lines, report.by_character(values))
        axes.set_title(title, fontsize=8.5, loc="left", wrap=True)
    stream = io.BytesIO()
    with warnings.catch_warnings():
        # A box stands for a character that the font lacks; the page shows it.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure.savefig(stream, format="png", dpi=130)
    return stream.getvalue()


def _panels(report: Report) -> list[tuple[str, NDArray[np.float64]]]:
    found, panels = report.explanation, []
    if found.steps:
        step = found.steps[0]
        weights_S = step.weights_HTS.mean(axis=0)[-1]
        heads = ", mean of the heads" if len(step.weights_HTS) > 1 else ""
        title = f"Weights at the last position: {step.label}{heads}.\n{step.reading.meaning}"
        panels.append((title, weights_S))
    if found.removal is not None:
        panels.append(
            (
                "Effect of each token's removal on the prediction after the last position; its own is left out.\n"
                "The Kullback-Leibler divergence in nats of the prediction with and without the token.",
                others(found.removal.divergence_TS[-1]),
            )
        )
    return panels or [("The text; nothing was measured.", np.zeros(len(report.tokens)))]


def _lines(texts: list[str]) -> list[list[tuple[int, int, str]]]:
    """Lines of (number of the text, column, part of it), broken at newlines and where a line is full."""
    lines: list[list[tuple[int, int, str]]] = [[]]
    column = 0
    for index, text in enumerate(texts):
        for number, part in enumerate(("⊢" if index == 0 else text).split("\n")):
            if number:
                lines.append([])
                column = 0
            for start in range(0, len(part), COLUMNS):
                piece = part[start : start + COLUMNS].replace("\t", " ")
                if column + len(piece) > COLUMNS:
                    lines.append([])
                    column = 0
                lines[-1].append((index, column, piece))
                column += len(piece)
    return lines


def _draw(axes: "Axes", lines: list[list[tuple[int, int, str]]], values: NDArray[np.float64]) -> None:
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize
    from matplotlib.patches import Rectangle

    largest = float(np.nanmax(np.abs(values), initial=0.0)) or 1.0
    is_signed = bool((values < 0).any())
    # The light part of the map: text stays readable on it.
    name, first, last = ("PuOr_r", 0.2, 0.8) if is_signed else ("Blues", 0.0, 0.55)
    colours = ListedColormap(colormaps[name](np.linspace(first, last, SHADES)))
    shades: Any = ScalarMappable(Normalize(-largest if is_signed else 0.0, largest), colours)
    visible = lines[:LINES]
    for row, line in enumerate(visible):
        for index, column, text in line:
            value = values[index]
            if value == value:
                axes.add_patch(Rectangle((column, row), len(text), 0.78, color=shades.to_rgba(value), linewidth=0))
                axes.add_patch(
                    Rectangle((column, row + 0.82), len(text) * abs(value) / largest, 0.1, color="0.25", linewidth=0)
                )
            axes.text(column, row + 0.6, text.replace("$", r"\$"), family="monospace", fontsize=9.2, color="0.05")
    if len(lines) > LINES:
        axes.text(
            0, LINES + 0.6, f"and {plural(len(lines) - LINES, 'line')} more, on the page", fontsize=8, color="0.4"
        )
    axes.set(xlim=(0, COLUMNS), ylim=(len(visible) + (len(lines) > LINES), 0))
    axes.set_axis_off()
    bar = axes.figure.colorbar(shades, ax=axes, fraction=0.025, pad=0.01)
    bar.ax.tick_params(labelsize=7)
