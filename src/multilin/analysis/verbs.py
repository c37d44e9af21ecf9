"""The verbs of the command line that score, explain, describe and round a model."""

import functools
import json
from typing import Any

from rich.console import Console

from multilin.analysis.evaluate_run import EvaluationSettings
from multilin.analysis.explain_run import ExplainSettings
from multilin.analysis.info import ModelSizes
from multilin.errors import InputError
from multilin.messages import as_json, say_next
from multilin.settings import settings
from multilin.settings.bounds import PathText, Tokens


@settings
class EvaluateArguments:
    """What to score."""

    run: PathText  # folder of a trained model
    long: bool = False  # read every document whole, through the state, instead of blocks
    tasks: str | None = None  # names of lm-eval tasks, separated by commas, to score on instead of a text
    task_folder: PathText | None = None  # a folder with lm-eval tasks of your own
    trust_task_code: bool = False  # run the code in that folder: its YAML and templates can hold Python
    task_limit: Tokens | None = None  # examples of each task; none takes all
    json: bool = False  # print JSON
    output: PathText | None = None  # also write the JSON to this file


def evaluate(what: EvaluateArguments, how: EvaluationSettings) -> None:
    """Score a trained model on a text, as a whole and by position, kind of token, frequency and document.

    Bits per byte can be compared across tokenizers, nats per token and perplexity cannot. With --tasks the model is
    scored on tasks of EleutherAI's lm-eval instead.
    """
    from multilin.analysis.evaluate_run import break_down_run
    from multilin.analysis.evaluate_view import as_data, print_breakdown, print_tasks, score_tasks
    from multilin.files import check_writable, write_whole
    from multilin.inference.runs import load_run

    _check_together(what, how)
    if what.output:
        check_writable("--output", what.output)
    run, console = load_run(what.run), Console(highlight=False)
    data: dict[str, Any]
    if what.tasks is not None:
        data = score_tasks(
            run, what.tasks, what.task_folder, what.task_limit, how.batch_size, trust_task_code=what.trust_task_code
        )
        show = functools.partial(print_tasks, data, console)
    else:
        found = break_down_run(run, how, long=what.long)
        data, show = as_data(found), functools.partial(print_breakdown, found, console)
    content = json.dumps(data, indent=2, ensure_ascii=False)
    if what.json:
        print(content)
    else:
        show()
    if what.output:
        write_whole(what.output, f"{content}\n")
    say_next(f"multilin explain {what.run}", f"multilin generate {what.run}")


def explain(what: ExplainSettings) -> None:
    """Show what a trained model read of a text: the weights of its layers, checked by removing each token.

    Writes a page to look at, a picture and JSON, and shows the text coloured by what its last position read.
    """
    from multilin.analysis.explain_page import write_files
    from multilin.analysis.explain_run import explain_run, output_folder
    from multilin.analysis.explain_view import print_report

    folder = output_folder(what)
    report = explain_run(what)
    paths = write_files(report, folder)
    if what.json:
        print(paths[-1].read_text(encoding="utf-8"))
    else:
        print_report(report, Console(highlight=False))
        print("\nWritten:", *paths, sep="\n  ")
    say_next(f"open {paths[0]} in a browser", f"multilin evaluate {what.run}")


@settings
class QuantizeArguments:
    """What to round."""

    run: PathText  # folder of a trained model
    output: PathText | None = None  # folder for the int8 model; without one RUN-int8


@settings
class InfoArguments:
    """What to describe."""

    model: PathText  # folder of a trained model, or the name of an architecture
    json: bool = False  # print JSON


def quantize(what: QuantizeArguments, how: EvaluationSettings) -> None:
    """Round a trained model's weights to int8, and show size and loss of both.

    Embedding and output stay as they are; evaluate and generate run from the new folder.
    """
    from multilin.analysis.quantize_run import print_quantized, quantize_run

    found = quantize_run(what.run, what.output, how)
    print_quantized(found, Console(highlight=False))
    say_next(f"multilin generate {found.int8_folder}", f"multilin evaluate {found.int8_folder}")


def info(what: InfoArguments, sizes: ModelSizes) -> None:
    """Describe a model: parameters, work per token, state, layers; and the options of an architecture."""
    from multilin.analysis.info import find_model, print_info, print_options

    found, architecture = find_model(what.model, sizes)
    if what.json:
        print(as_json(found))
        return
    print_info(found, Console(highlight=False))
    if architecture is not None:
        print_options(architecture, Console(highlight=False))


def _check_together(what: EvaluateArguments, how: EvaluationSettings) -> None:
    """Refuse what would be ignored."""
    of_texts = {"--long": what.long, "--source": how.source, "--max-tokens": how.max_tokens}
    of_tasks = {
        "--task-folder": what.task_folder,
        "--trust-task-code": what.trust_task_code,
        "--task-limit": what.task_limit,
    }
    for name, given in of_texts.items():
        if given and what.tasks is not None:
            raise InputError(f"{name}: given together with --tasks, which bring their own texts; leave one of them out")
    for name, given in of_tasks.items():
        if given and what.tasks is None:
            raise InputError(f"{name}: given without --tasks; name the tasks to score on")
