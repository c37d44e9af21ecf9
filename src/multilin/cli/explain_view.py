"""An explanation in the terminal: the text coloured by what its last position read, and tables with the numbers."""

import numpy as np
from numpy.typing import NDArray
from rich.padding import Padding
from rich.style import Style
from rich.text import Text

from multilin.analysis.explain.explanation import mask_own_token
from multilin.analysis.explain.run import MEANINGS, Report, finding
from multilin.cli.tables import make_console, print_table
from multilin.errors import plural

NUM_LARGEST = 10
SHADES = ((235, 242, 252), (200, 221, 247), (152, 193, 240), (96, 158, 229), (43, 117, 209))


def print_report(report: Report) -> None:
    """The text, what its last position read, what the removal of tokens changes there, and whether both agree."""
    console, explanation = make_console(), report.explanation
    last = len(report.tokens) - 1
    console.print(f"[bold]What {report.name} read[/bold]: {report.source}, {plural(last, 'token')}", highlight=False)
    if explanation.steps:
        step = explanation.steps[0]
        weights_S = step.weights_HTS.mean(axis=0)[-1]
        console.print(f"\nWeights at the last position, {step.label}. {step.reading.meaning}")
        console.print(Padding(_coloured(report, weights_S), (1, 0)))
        _print_largest(report, weights_S, "weight")
    if explanation.removal is not None:
        effects_S = mask_own_token(explanation.removal.divergence_TS[-1])
        console.print(
            f"\nEffect of removal on the prediction after the last position, whose own token is left out. "
            f"{MEANINGS['divergence']}"
        )
        if not explanation.steps:
            console.print(Padding(_coloured(report, effects_S), (1, 0)))
        _print_largest(report, effects_S, "divergence")
    if explanation.steps and explanation.removal is not None:
        console.print(f"\n{MEANINGS['agreement']}")
        _print_agreements(report)
    console.print(f"\n[bold]{finding(explanation)}[/bold]", highlight=False)


def _coloured(report: Report, values_S: NDArray[np.float64]) -> Text:
    text = Text()
    largest = np.nanmax(np.abs(values_S), initial=0.0)
    parts = ["⊢", *(part for _, part in report.characters[1:])]
    for part, value in zip(parts, report.by_character(values_S), strict=True):
        size = 0.0 if largest == 0 or value != value else abs(value) / largest
        shade = SHADES[min(int(size * len(SHADES)), len(SHADES) - 1)]
        style = Style(color="black", bgcolor="#{:02x}{:02x}{:02x}".format(*shade)) if size > 0.02 else Style()
        text.append(part, style)
    return text


def _print_largest(report: Report, values_S: NDArray[np.float64], name: str) -> None:
    order = np.argsort(-np.abs(np.nan_to_num(values_S)), kind="stable")[:NUM_LARGEST]
    labels = report.labels
    rows = [
        ("start of the text" if index == 0 else labels[index], str(index), f"{values_S[index]:.4g}")
        for index in order
        if values_S[index] and values_S[index] == values_S[index]
    ]
    print_table("lrr", rows, head=("token", "at", name))


def _print_agreements(report: Report) -> None:
    rows = []
    for step in report.explanation.steps:
        each = [agreement.correlation for agreement in step.agreements[:-1] if agreement.correlation is not None]
        heads = f"{min(each):.2f} to {max(each):.2f}" if each else ""
        last = step.agreements[-1]
        rows.append((step.label, _number(last.correlation), heads, _number(last.nearness)))
    print_table("lrrr", rows, head=("", "weights", "single heads", "nearness"))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
