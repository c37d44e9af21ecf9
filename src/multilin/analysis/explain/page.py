"""The files of an explanation: a page that needs no network, a picture, and JSON."""

import base64
import io
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from multilin.analysis.explain.explanation import Step
from multilin.analysis.explain.run import MEANINGS, Report, answer, finding
from multilin.analysis.templates import render
from multilin.errors import plural
from multilin.files import write_whole
from multilin.files.lock import locked_folder
from multilin.settings.inputs import to_json

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DIGITS = 7
COLUMNS = 120  # characters in a line of the picture
LINE_INCHES = 0.26
SHADES = 256
LINES = 40  # lines of text in a panel of the picture


def write_files(report: Report, folder: Path) -> list[Path]:
    """Write explain.html, explain.png and explain.json; if it fails, no file is left incomplete."""
    contents: dict[str, str | bytes] = {"html": page(report), "png": picture(report), "json": as_json(report)}
    paths = [folder / f"explain.{suffix}" for suffix in contents]
    with locked_folder("--output", folder):  # removes a new folder if it is not writable
        for path, content in zip(paths, contents.values(), strict=True):
            write_whole(path, content)
    return paths


def as_json(report: Report) -> str:
    """The explanation as JSON, with the meaning of every number.

    Weights and effects have one row per position: {"first": s, "values": [...]} holds the values of tokens s, s + 1 and
    so on. A position reads no token outside its row, and removing such a token has no effect on the position.
    """
    names = {"answer": answer(report), "finding": finding(report.explanation)}
    names |= {"run": report.run, "source": report.source}
    return to_json(names | _numbers(report, packed=False), ensure_ascii=False)


def page(report: Report) -> str:
    """The explanation as one HTML file."""
    return render(
        "explain.html.jinja",
        run=report.name,
        source=report.source,
        size=plural(len(report.tokens) - 1, "token"),
        answer=answer(report),
        finding=finding(report.explanation),
        meaning=MEANINGS,
        data=_numbers(report, packed=True),
    )


def _numbers(report: Report, *, packed: bool) -> dict[str, Any]:
    """All numbers and their meanings, with arrays as lists, or packed as base64 of little-endian float32."""
    explanation, removal = report.explanation, report.explanation.removal
    matches = explanation.matches or [(0, 0)] * len(report.tokens)
    columns = explanation.token_ids, report.tokens, [*explanation.losses, np.nan], explanation.guesses, matches
    starts = np.cumsum([0, *(num_tokens for num_tokens, _ in report.characters)]).tolist()
    effects = removal and {"divergence": removal.divergence_TS, "loss_change": removal.loss_change_TS}
    return {
        "meaning": MEANINGS,
        "tokens": [
            {
                "id": token_id,
                "text": text,
                "loss_of_next": _rounded(loss),
                "guesses": [{"id": i, "text": report.texts[i], "probability": _rounded(p)} for i, p in guesses],
                "match": {"length": length, "id": found, "text": report.texts[found]} if length else None,
            }
            for token_id, text, loss, guesses, (found, length) in zip(*columns, strict=True)
        ],
        "characters": [
            {"first": first, "tokens": num_tokens, "text": text}
            for first, (num_tokens, text) in zip(starts, report.characters, strict=False)
        ],
        "steps": [_step(step, packed) for step in explanation.steps],
        "removal": effects and {name: _rows(values_TS, 0, None, packed) for name, values_TS in effects.items()},
    }


def _step(step: Step, packed: bool) -> dict[str, Any]:
    reading = step.reading

    def values(values_BHT: Tensor | None, head: int) -> Any:
        return None if values_BHT is None else _list(values_BHT[0, head].numpy(), packed)

    return {
        "layer": step.layer,
        "step": step.name,
        "label": step.label,
        **{name: getattr(reading, name) for name in ("meaning", "is_share", "nearest", "farthest")},
        "agreements": [asdict(agreement) for agreement in step.agreements],
        "heads": [
            {
                "rows": _rows(weights_TS, reading.nearest, reading.farthest, packed),
                "own": values(reading.own_BHT, head),
                "null": values(reading.null_BHT, head),
            }
            for head, weights_TS in enumerate(step.weights_HTS)
        ],
    }


def _rows(values_TS: NDArray[np.float64], nearest: int, farthest: int | None, packed: bool) -> Any:
    """The values of the tokens that each position reads, as rows with a start index, or packed into one array."""
    firsts = [0 if farthest is None else max(0, place - farthest) for place in range(len(values_TS))]
    rows = [values_TS[t, first : max(first, t - nearest + 1)] for t, first in enumerate(firsts)]
    if packed:
        return _list(np.concatenate(rows), packed)
    return [{"first": first, "values": _list(row, packed)} for first, row in zip(firsts, rows, strict=True)]


def _list(values: NDArray[np.float64], packed: bool) -> list[float | None] | str:
    if packed:
        return base64.b64encode(values.astype("<f4").tobytes()).decode("ascii")
    return [_rounded(value) for value in values.tolist()]


def _rounded(value: float) -> float | None:
    """The value with DIGITS digits; None for nan, which marks a value that was not measured."""
    return None if value != value else float(f"{value:.{DIGITS}g}")


def picture(report: Report) -> bytes:
    """Draw a PNG: the text coloured by the weights at the last position, and by the effects of removals there."""
    from matplotlib.figure import Figure

    panels, pieces = _panels(report), list(_pieces([text for _, text in report.characters]))
    num_lines = pieces[-1][1] + 1
    figure = Figure(
        figsize=(10.5, len(panels) * (min(num_lines, LINES) * LINE_INCHES + 1.1) + 0.6), layout="constrained"
    )
    figure.suptitle(f"What {report.name} read", fontsize=12, fontweight="bold", parse_math=False)
    for axes, (title, values) in zip(np.atleast_1d(figure.subplots(len(panels))), panels, strict=True):
        _draw(axes, pieces, report.by_character(values))
        axes.set_title(title, fontsize=8.5, loc="left", wrap=True)
    stream = io.BytesIO()
    with warnings.catch_warnings():
        # The picture shows a box for a character that the font lacks; the page shows the character.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure.savefig(stream, format="png", dpi=130)
    return stream.getvalue()


def _panels(report: Report) -> list[tuple[str, NDArray[np.float64]]]:
    explanation, panels = report.explanation, []
    if explanation.last_weights_S is not None:
        step = explanation.steps[0]
        heads = ", mean of the heads" if len(step.weights_HTS) > 1 else ""
        title = f"Weights at the last position: {step.label}{heads}.\n{step.reading.meaning}"
        panels.append((title, explanation.last_weights_S))
    if explanation.last_effects_S is not None:
        title = (
            "How much the prediction after the text changes when a token is removed; the last token is left out.\n"
            "Kullback-Leibler divergence in nats between the predictions with and without the token."
        )
        panels.append((title, explanation.last_effects_S))
    return panels or [("The text; neither weights nor effects were measured.", np.zeros(len(report.tokens)))]


def _pieces(texts: list[str]) -> Iterator[tuple[int, int, int, str]]:
    """Break texts at newlines and where lines are full. Yield the index of the text, line, column and piece."""
    line = column = 0
    for index, text in enumerate(["⊢", *texts[1:]]):
        for number, part in enumerate(text.split("\n")):
            if number:
                line, column = line + 1, 0
            for start in range(0, len(part), COLUMNS):
                piece = part[start : start + COLUMNS].replace("\t", " ")
                if column + len(piece) > COLUMNS:
                    line, column = line + 1, 0
                yield index, line, column, piece
                column += len(piece)


def _draw(axes: "Axes", pieces: list[tuple[int, int, int, str]], values: NDArray[np.float64]) -> None:
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize
    from matplotlib.patches import Rectangle

    largest = float(np.nanmax(np.abs(values), initial=0.0)) or 1.0
    is_signed = bool((values < 0).any())
    # Only the light part of the colour map, where the text is readable.
    name, first, last = ("PuOr_r", 0.2, 0.8) if is_signed else ("Blues", 0.0, 0.55)
    colours = ListedColormap(colormaps[name](np.linspace(first, last, SHADES)))
    shades: Any = ScalarMappable(Normalize(-largest if is_signed else 0.0, largest), colours)
    num_lines = pieces[-1][1] + 1
    for index, line, column, text in pieces:
        if line >= LINES:
            axes.text(
                0, LINES + 0.6, f"and {plural(num_lines - LINES, 'line')} more in explain.html", fontsize=8, color="0.4"
            )
            break
        if (value := values[index]) == value:
            size = abs(value) / largest
            axes.add_patch(Rectangle((column, line), len(text), 0.78, color=shades.to_rgba(value), linewidth=0))
            axes.add_patch(Rectangle((column, line + 0.82), len(text) * size, 0.1, color="0.25", linewidth=0))
        axes.text(column, line + 0.6, text, family="monospace", fontsize=9.2, color="0.05", parse_math=False)
    axes.set(xlim=(0, COLUMNS), ylim=(min(num_lines, LINES) + (num_lines > LINES), 0))
    axes.set_axis_off()
    axes.figure.colorbar(shades, ax=axes, fraction=0.025, pad=0.01).ax.tick_params(labelsize=7)
