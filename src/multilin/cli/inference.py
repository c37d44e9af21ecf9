"""The verbs that run a trained model, merge adapters into a model, or convert a model of another package."""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from multilin.cli.export import open_at_once
from multilin.cli.messages import as_json, load, loading, read_prompt, say_next
from multilin.cli.tables import make_console
from multilin.errors import InputError, plural
from multilin.files import beside, check_folder, check_writable
from multilin.inference.settings import EngineName, GenerationSettings, RolloutSettings
from multilin.runs.files import check_run_files, is_adapter
from multilin.settings import settings
from multilin.settings.bounds import PathText, Prose
from multilin.settings.inputs import check_regular

if TYPE_CHECKING:
    from multilin.inference.rollout import RolloutResult


@settings
class GenerateArguments:
    """The model and the prompt."""

    run: PathText  # folder of a trained or exported model
    prompt: Prose | None = None  # text to continue; if not given, read from a pipe, or the model begins a new text
    prompt_file: PathText | None = None  # file with the text to continue; a newline at its end is dropped
    state: PathText | None = None  # continue from the state in this file; a prompt is added to the text of the state
    save_state: PathText | None = None  # write the state after the last token to this file, to continue with --state
    engine: EngineName = "auto"  # auto: ONNX Runtime on a CPU, once a background export is ready; else PyTorch
    echo: bool = True  # also print the prompt


@settings
class RolloutArguments:
    """The model and the prompt."""

    run: PathText  # folder of a trained model whose layers are all linear
    prompt: Prose | None = None  # text to continue; if not given, read from a pipe
    prompt_file: PathText | None = None  # file with the text to continue; a newline at its end is dropped
    json: bool = False  # print JSON


@settings
class MergeArguments:
    """The run to merge."""

    run: PathText  # folder of a run that trained adapters
    output: PathText | None = None  # new folder for the model; RUN-merged if not given


@settings
class ConvertArguments:
    """The checkpoint to convert."""

    kind: Literal["fastformer", "leap"]  # package of the checkpoint: fastformer (fastformerLM) or leap
    source: PathText  # folder of the checkpoint
    output: PathText  # folder to write the multilin model to


def generate(arguments: GenerateArguments, settings: GenerationSettings) -> None:
    """Generate text with a trained model, and print each token as it comes.

    stdout gets only the text: the prompt and its continuation.
    """
    prompt = read_prompt(arguments.prompt, arguments.prompt_file)
    state, save_state = arguments.state, arguments.save_state
    write = functools.partial(print, end="", flush=True)
    run, keeps_states, has_room = arguments.run, False, False
    if settings.num_beams > 1:
        _search(arguments, prompt, settings, write)
    else:
        if state is not None:
            check_regular(state, "--state")
        if save_state is not None:
            check_writable("--save-state", save_state)
        with open_at_once(Path(run), arguments.engine) as (engine, codec):
            from multilin.inference.generate import continue_file

            keeps_states = engine.keeps_states
            has_room = continue_file(
                engine, codec, prompt, settings, state=state, save_state=save_state, echo=arguments.echo, write=write
            ).has_room
    if sys.stdout.isatty():
        print()
    if save_state and has_room:
        say_next(["multilin", "generate", run, "--state", save_state])
    elif keeps_states:
        say_next(["multilin", "generate", run, "--save-state", "text.state"], ["multilin", "serve", run])
    else:
        say_next(["multilin", "info", run])


def _search(
    arguments: GenerateArguments, prompt: str, settings: GenerationSettings, write: Callable[[str], object]
) -> None:
    """Generate text with beam search, in PyTorch."""
    for name, given in (("state", arguments.state), ("save-state", arguments.save_state)):
        if given is not None:
            raise InputError(
                f"--{name}: given, but beam search (--num-beams {settings.num_beams}) keeps no state; use --num-beams 1"
            )
    if arguments.engine == "onnx":
        raise InputError(f"num_beams: {settings.num_beams} given, but only the engine torch has beam search")
    check_run_files(arguments.run)
    run = load(arguments.run)
    from multilin.inference.generate_run import generate_text

    generate_text(run, prompt, settings, write=write, echo=arguments.echo)


def rollout(arguments: RolloutArguments, settings: RolloutSettings) -> None:
    """Feed an all-linear model's raw outputs back as its inputs, in parallel and one by one.

    The whole output vector is fed back, not the likeliest token. Each vector is printed as its likeliest token.
    """
    check_run_files(arguments.run)
    prompt = read_prompt(arguments.prompt, arguments.prompt_file)
    run = load(arguments.run)
    from multilin.inference.rollout import rollout_run

    result = rollout_run(run, prompt, settings)
    if arguments.json:
        print(as_json(result))
        return
    _print_rollout(result)
    say_next(["multilin", "generate", arguments.run], ["multilin", "info", arguments.run])


def merge(arguments: MergeArguments) -> None:
    """Merge a run's LoRA adapters into their base model, and write the result as a new model."""
    check_run_files(arguments.run)
    if not is_adapter(Path(arguments.run)):
        raise InputError(f"run: {arguments.run} holds a whole model, but only adapters can be merged")
    output = Path(arguments.output or beside(arguments.run, "-merged"))
    check_folder("--output", output, must_be_new=True)
    run = load(arguments.run)
    from multilin.runs.load import save_run

    save_run(run, output)
    say_next(["multilin", "generate", output], ["multilin", "info", output])


def convert(arguments: ConvertArguments) -> None:
    """Convert a checkpoint of another package into a multilin model with the same logits."""
    with loading():
        from multilin.inference.convert import convert_checkpoint
    convert_checkpoint(arguments.kind, Path(arguments.source), Path(arguments.output))
    say_next(["multilin", "info", arguments.output])


def _print_rollout(result: "RolloutResult") -> None:
    """Print the texts of the parallel and the sequential rollout, their times, and the difference of their vectors."""
    console = make_console()
    console.print(
        "Raw output vectors are fed back as inputs. Each vector is shown as its likeliest token.\n",
        soft_wrap=True,
    )
    for name, way in (("parallel", result.parallel), ("sequential", result.sequential)):
        text = repr(result.prompt + way.text)
        console.print(f"{name:11}{1e3 * way.seconds:10.2f} ms  {text}", soft_wrap=True, markup=False)
    console.print(
        f"\n{plural(result.num_steps, 'output')} after {plural(result.num_prompt_tokens, 'token')} in "
        f"{result.dtype}: parallel is {result.speedup:.1f} times as fast; the two outputs differ by at most "
        f"{result.largest_difference:.1e} (relative)",
        soft_wrap=True,
    )
