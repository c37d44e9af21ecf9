"""The verb that shows which tokens of a text a model uses, and prints a report in the terminal."""

from pathlib import Path
from typing import TYPE_CHECKING

from multilin.analysis.settings import ExplainSettings
from multilin.cli.messages import load, read_prompt, say_next
from multilin.cli.tables import make_console, print_table
from multilin.errors import plural
from multilin.files import check_folder, check_writable
from multilin.runs.files import check_run_files
from multilin.settings import settings
from multilin.settings.bounds import PathText, Prose

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from rich.text import Text

    from multilin.analysis.explain.run import Report

REPORT_KINDS = ("html", "png", "json")  # endings of the files explain.html, ...
NUM_LARGEST = 10
SHADES = ((235, 242, 252), (200, 221, 247), (152, 193, 240), (96, 158, 229), (43, 117, 209))


@settings
class ExplainArguments:
    """The model and the text to explain."""

    run: PathText  # folder of a trained model
    text: Prose | None = None  # text to explain; if not given, it is read from a pipe or taken from the validation text
    file: PathText | None = None  # file with the text to explain; a newline at its end is dropped
    output: PathText | None = None  # folder for the page, the picture and the JSON; RUN/explain if not given
    json: bool = False  # print the JSON


def explain(arguments: ExplainArguments, settings: ExplainSettings) -> None:
    """Show which tokens of a text a model used: the weights of its layers, checked by removing each token.

    Write a web page, a picture and JSON, and print the text. A token's colour shows how much the last position used it.
    """
    check_run_files(arguments.run)
    folder = _output_folder(arguments)
    text: str | None = read_prompt(arguments.text, arguments.file, names=("--text", "--file"))
    if arguments.text is None and arguments.file is None:
        text = text or None  # nothing was piped in
    run = load(arguments.run)
    from multilin.analysis.explain.page import write_files
    from multilin.analysis.explain.run import explain_run
    from multilin.cli.progress import show_progress

    with show_progress() as progress:
        report = explain_run(run, text, settings, progress=progress)
    paths = write_files(report, folder)
    if arguments.json:
        print(paths[-1].read_text(encoding="utf-8"))
    else:
        print_report(report)
        print("\nFiles; open the page in a browser:", *paths, sep="\n  ")
    say_next(["multilin", "evaluate", arguments.run])


def _output_folder(arguments: ExplainArguments) -> Path:
    """The folder for the files; refuses a folder that cannot be written."""
    output = arguments.output or Path(arguments.run, "explain")
    check_folder("--output", output)
    folder = Path(output)
    for path in [folder / f"explain.{kind}" for kind in REPORT_KINDS] if folder.exists() else [folder]:
        check_writable("--output", path)
    return folder


def print_report(report: "Report") -> None:
    """Print the findings in words, then the weights and the effects of removing tokens at the last position."""
    from rich.padding import Padding

    from multilin.analysis.explain.run import MEANINGS, answer, finding

    console, explanation = make_console(), report.explanation
    last = len(report.tokens) - 1
    console.print(f"Tokens that {report.name} used", style="bold", end="", markup=False, highlight=False)
    console.print(f": {report.source}, {plural(last, 'token')}", markup=False, highlight=False)
    console.print(f"\n{answer(report)}", style="bold", markup=False, highlight=False)
    console.print(f"\n{finding(explanation)}", markup=False, highlight=False)
    weights_S, effects_S = explanation.last_weights_S, explanation.last_effects_S
    if weights_S is not None:
        step = explanation.steps[0]
        console.print(f"\nWeights at the last position, {step.label}. {step.reading.meaning}")
        console.print(Padding(_coloured(report, weights_S), (1, 0)))
        _print_largest(report, weights_S, "weight")
    if effects_S is not None:
        console.print(
            f"\nEffect on the prediction of the next token when a token before the last one is removed. "
            f"{MEANINGS['divergence']}"
        )
        if weights_S is None:
            console.print(Padding(_coloured(report, effects_S), (1, 0)))
        _print_largest(report, effects_S, "divergence")
    if weights_S is not None and effects_S is not None:
        console.print(f"\n{MEANINGS['agreement']}")
        _print_agreements(report)


def _coloured(report: "Report", values_S: "NDArray[np.float64]") -> "Text":
    import numpy as np
    from rich.style import Style
    from rich.text import Text

    text = Text()
    largest = np.nanmax(np.abs(values_S), initial=0.0)
    parts = ["⊢", *(part for _, part in report.characters[1:])]
    for part, value in zip(parts, report.by_character(values_S), strict=True):
        size = 0.0 if largest == 0 or value != value else abs(value) / largest
        shade = SHADES[min(int(size * len(SHADES)), len(SHADES) - 1)]
        style = Style(color="black", bgcolor="#{:02x}{:02x}{:02x}".format(*shade)) if size > 0.02 else Style()
        text.append(part, style)
    return text


def _print_largest(report: "Report", values_S: "NDArray[np.float64]", name: str) -> None:
    from multilin.analysis.explain.explanation import largest

    labels = report.labels
    rows = [
        ("start of the text" if index == 0 else labels[index], str(index), f"{values_S[index]:.4g}")
        for index in largest(values_S, NUM_LARGEST)
    ]
    print_table("lrr", rows, head=("token", "position", name))


def _print_agreements(report: "Report") -> None:
    rows = []
    for step in report.explanation.steps:
        each = [agreement.correlation for agreement in step.agreements[:-1] if agreement.correlation is not None]
        heads = f"{min(each):.2f} to {max(each):.2f}" if each else ""
        last = step.agreements[-1]
        rows.append((step.label, _number(last.correlation), heads, _number(last.nearness)))
    print_table("lrrr", rows, head=("", "weights", "single heads", "nearness"))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
