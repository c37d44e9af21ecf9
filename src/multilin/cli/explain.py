"""The verb that shows what a model read."""

from pathlib import Path

from multilin.analysis.settings import ExplainSettings
from multilin.cli.messages import loading, say_next
from multilin.cli.prompts import read_prompt
from multilin.files import check_folder, check_writable
from multilin.inference.run_files import check_run_files
from multilin.settings import settings
from multilin.settings.bounds import PathText, Prose

REPORT_KINDS = ("html", "png", "json")  # of the files explain.html, ...


@settings
class ExplainArguments:
    """What to explain."""

    run: PathText  # folder of a trained model
    text: Prose | None = None  # text to explain; without one it is read from a pipe, or taken from the validation text
    file: PathText | None = None  # file with the text to explain; one newline at its end is left out
    output: PathText | None = None  # folder for the page, the picture and the JSON; without one RUN/explain
    json: bool = False  # print the JSON


def explain(arguments: ExplainArguments, settings: ExplainSettings) -> None:
    """Show what a trained model read of a text: the weights of its layers, checked by removing each token.

    Writes a page to look at, a picture and JSON, and shows the text coloured by what its last position read.
    """
    check_run_files(arguments.run)
    folder = _output_folder(arguments)
    text: str | None = read_prompt(arguments.text, arguments.file, names=("--text", "--file"))
    if not text and arguments.text is None and arguments.file is None:
        text = None
    with loading(f"PyTorch and {arguments.run}"):
        from multilin.analysis.explain.page import write_files
        from multilin.analysis.explain.run import explain_run
        from multilin.cli.explain_view import print_report
        from multilin.cli.progress import show_progress
        from multilin.inference.runs import load_run

        run = load_run(arguments.run)
    with show_progress() as progress:
        report = explain_run(run, text, settings, progress=progress)
    paths = write_files(report, folder)
    if arguments.json:
        print(paths[-1].read_text(encoding="utf-8"))
    else:
        print_report(report)
        print("\nWritten:", *paths, sep="\n  ")
    say_next(f"open {paths[0]} in a browser", f"multilin evaluate {arguments.run}")


def _output_folder(arguments: ExplainArguments) -> Path:
    """Where the files go, checked before any work."""
    folder = Path(arguments.run, "explain") if arguments.output is None else Path(arguments.output)
    check_folder("--output", folder if arguments.output is None else arguments.output)
    for path in [folder / f"explain.{kind}" for kind in REPORT_KINDS] if folder.exists() else [folder]:
        check_writable("--output", path)
    return folder
