"""The verbs that score a trained model: on a text, on tasks of lm-eval, and with its weights rounded to int8."""

import functools
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from multilin.analysis.settings import EvaluationSettings
from multilin.cli.messages import as_json, check_installed, load, loading, say_next
from multilin.cli.tables import make_console, print_table
from multilin.errors import InputError, plural
from multilin.files import check_writable, write_whole
from multilin.runs.files import check_run_files
from multilin.settings import settings
from multilin.settings.bounds import PathText, Tokens

if TYPE_CHECKING:
    from multilin.analysis.quantize import Quantized

OPENING_CHARACTERS = 40


@settings
class EvaluateArguments:
    """The model and the tasks."""

    run: PathText  # folder of a trained model
    long: bool = False  # read each document as a whole, with the state carried along, instead of in blocks
    tasks: str | None = None  # names of lm-eval tasks, separated by commas, to score on instead of a text
    task_folder: PathText | None = None  # folder with your lm-eval tasks
    trust_task_code: bool = False  # allow the Python code in YAML files and templates of --task-folder to run
    task_limit: Tokens | None = None  # largest number of examples of each task; all if not given
    json: bool = False  # print JSON
    output: PathText | None = None  # also write the JSON to this file


@settings
class QuantizeArguments:
    """The model to round."""

    run: PathText  # folder of a trained model
    output: PathText | None = None  # folder for the int8 model; RUN-int8 if not given


def evaluate(arguments: EvaluateArguments, settings: EvaluationSettings) -> None:
    """Score a trained model on a text, as a whole and by position, kind of token, frequency and document.

    Bits per byte can be compared across tokenizers; nats per token and perplexity cannot. With --tasks, the model is
    scored on tasks of EleutherAI's lm-eval instead.
    """
    _check_together(arguments, settings)
    tasks = _task_names(arguments.tasks)
    check_run_files(arguments.run)
    if arguments.output is not None:
        check_writable("--output", arguments.output)
    run = load(arguments.run)
    data: dict[str, Any]
    if tasks:
        with loading("lm-eval"):
            import datasets

            from multilin.analysis.evaluate.tasks import evaluate_tasks

        # These libraries print progress bars, and remarks about every task and model.
        datasets.disable_progress_bars()
        logging.getLogger("lm_eval").setLevel(logging.CRITICAL)
        data = evaluate_tasks(
            run, tasks, folder=arguments.task_folder, trust_task_code=arguments.trust_task_code,
            limit=arguments.task_limit, batch_size=settings.batch_size,
        )  # fmt: skip
        show = functools.partial(_print_tasks, data)
    else:
        from multilin.analysis.evaluate.breakdown import as_data
        from multilin.analysis.evaluate.run import break_down_run
        from multilin.cli.progress import show_progress

        with show_progress() as progress:
            data = as_data(break_down_run(run, settings, long=arguments.long, progress=progress))
        show = functools.partial(_print_breakdown, data)
    content = as_json(data)
    if arguments.output is not None:
        write_whole(arguments.output, f"{content}\n")
    if arguments.json:
        print(content)
    else:
        show()
    say_next(["multilin", "explain", arguments.run], ["multilin", "generate", arguments.run])


def quantize(arguments: QuantizeArguments, settings: EvaluationSettings) -> None:
    """Round a trained model's weights to int8, and compare size and loss with the original.

    Embedding and output layer are not rounded. `evaluate` and `generate` take the new folder as a run.
    """
    _check_source(settings)
    check_run_files(arguments.run)
    with loading():
        from multilin.analysis.quantize import quantize_run
        from multilin.cli.progress import show_progress
    with show_progress() as progress:
        result = quantize_run(arguments.run, arguments.output, settings, progress)
    _print_quantized(result)
    say_next(["multilin", "generate", result.int8_folder], ["multilin", "evaluate", result.int8_folder])


def _check_together(arguments: EvaluateArguments, settings: EvaluationSettings) -> None:
    """Refuse flags that would be ignored."""
    for_texts = {
        "--long": arguments.long,
        "--source": settings.source,
        "--max-tokens": settings.max_tokens,
        **_of_source(settings),
    }
    for_tasks = {"--task-folder": arguments.task_folder, "--trust-task-code": arguments.trust_task_code,
                 "--task-limit": arguments.task_limit}  # fmt: skip
    ignored = for_tasks if arguments.tasks is None else for_texts
    if name := next((name for name, given in ignored.items() if given), None):
        if arguments.tasks is None:
            raise InputError(f"{name}: given without --tasks; name the tasks to score on")
        raise InputError(f"{name}: given with --tasks, but tasks have their own texts; leave one of the two out")
    if arguments.long and settings.batch_size != EvaluationSettings.batch_size:
        raise InputError("--batch-size: given together with --long, which reads one document at a time; leave it out")
    _check_source(settings)


def _check_source(settings: EvaluationSettings) -> None:
    """Refuse flags that describe the text of --source if there is no --source."""
    given = [name for name, is_given in _of_source(settings).items() if is_given]
    if settings.source is None and given:
        raise InputError(f"{given[0]}: given without --source, but it describes the text of --source; give both")


def _of_source(settings: EvaluationSettings) -> dict[str, bool]:
    return {"--text-field": settings.text_field != EvaluationSettings.text_field,
            "--encoding-errors": settings.encoding_errors != EvaluationSettings.encoding_errors}  # fmt: skip


def _task_names(tasks: str | None) -> list[str]:
    if tasks is None:
        return []
    check_installed("--tasks:", "eval", "lm_eval")
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names:
        raise InputError(f"tasks: {tasks!r} given, but it should be names of lm-eval tasks, separated by commas")
    return names


def _print_breakdown(data: Mapping[str, Any]) -> None:
    """Print the score of the whole text, then a table for each way of grouping the tokens."""
    console = make_console()
    console.print(
        f"[bold]{data['bits_per_byte']:.4f} bits per byte[/bold], {data['loss']:.4f} nats per token, perplexity "
        f"{data['perplexity']:,.2f}; {plural(data['tokens'], 'token')}, {plural(data['bytes'], 'byte')}"
    )
    groupings = {"position": "tokens read before", "class": "kind of token", "frequency": "frequency in this text"}
    for name, title in groupings.items():
        console.print()
        rows = (
            (
                part["name"],
                "-" if part["bits_per_byte"] is None else f"{part['bits_per_byte']:.3f}",
                f"{part['loss']:.3f}",
                f"{100 * part['tokens'] / data['tokens']:.1f} %",
            )
            for part in data[f"by_{name}"]
        )
        print_table("lrrr", rows, head=(title, "bits per byte", "nats per token", "share of tokens"))
    console.print()
    _print_documents(data["by_document"])


def _print_documents(documents: Mapping[str, Any]) -> None:
    """Print the number of documents; if two or more are long, also the spread of scores, the best and the worst."""
    console, number, long_enough = make_console(), plural(documents["number"], "document"), documents["long_enough"]
    if "best" not in documents:
        console.print(f"{number}, {long_enough:,} of them with at least {documents['fewest_bytes']} bytes")
        return
    low, middle, high = documents["bits_per_byte_quantiles"].values()
    console.print(
        f"{number}, {long_enough:,} of them with at least {documents['fewest_bytes']} bytes: median {middle:.3f} bits "
        f"per byte; 80 % lie between {low:.3f} and {high:.3f}"
    )
    rows = []
    for name in ("best", "worst"):
        for part in documents[name]:
            figures = (f"{part['bits_per_byte']:.3f}", f"{part['bytes']:,.0f}")
            rows.append((name, part["name"], *figures, part["begins_with"][:OPENING_CHARACTERS]))
    print_table("lrrrw", rows, head=("", "document", "bits per byte", "bytes", "begins with"))


def _print_tasks(data: Mapping[str, Any]) -> None:
    """Print a line for each metric of each task."""
    rows = [
        (task, metric, f"{score['value']:.4f}", "" if (error := score["standard_error"]) is None else f"{error:.4f}")
        for task, metrics in data.items()
        for metric, score in metrics.items()
    ]
    print_table("llrr", rows, head=("task", "metric", "value", "standard error"))


def _print_quantized(result: "Quantized") -> None:
    """Print size and scores of both models."""
    before, after = result.evaluation, result.int8_evaluation
    figures = (
        ("weights, MB", result.weight_bytes / 1e6, result.int8_weight_bytes / 1e6, ",.2f"),
        ("loss, nats per token", before.loss, after.loss, ".4f"),
        ("bits per byte", before.bits_per_byte, after.bits_per_byte, ".4f"),
    )
    rows = [(name, f"{a:{form}}", f"{b:{form}}", f"{100 * (b / a - 1):+.2f} %") for name, a, b, form in figures]
    print_table("lrrr", rows, head=("", "trained", "int8", "change"))
