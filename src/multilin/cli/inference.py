"""The verbs that run a trained model, and the one that converts a model of another package."""

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
    prompt: Prose | None = None  # text to continue; without one it is read from a pipe, or the model begins a text
    prompt_file: PathText | None = None  # file with the text to continue; one newline at its end is left out
    state: PathText | None = None  # go on from the state in this file; the prompt, if any, is added to its text
    save_state: PathText | None = None  # write the state after the last token to this file, to go on from
    engine: EngineName = "auto"  # auto takes PyTorch until a background export for ONNX Runtime is ready, or on a GPU
    echo: bool = True  # also write the prompt itself to stdout


@settings
class RolloutArguments:
    """The model and the prompt."""

    run: PathText  # folder of a trained model, all of it linear
    prompt: Prose | None = None  # text to go on from; without one it is read from a pipe
    prompt_file: PathText | None = None  # file with the text to go on from; one newline at its end is left out
    json: bool = False  # print JSON


@settings
class MergeArguments:
    """The run to merge."""

    run: PathText  # folder of a run that trained adapters
    output: PathText | None = None  # new folder for the model; without one RUN-merged


@settings
class ConvertArguments:
    """The checkpoint to convert."""

    kind: Literal["fastformer", "leap"]  # the package that the checkpoint comes from: fastformer or leap
    source: PathText  # its folder
    output: PathText  # folder to write ours to


def generate(arguments: GenerateArguments, settings: GenerationSettings) -> None:
    """Generate text with a trained model, streamed as it comes.

    stdout gets the text alone: the prompt and what follows it.
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
    """Beam search, in PyTorch."""
    for name, given in (("state", arguments.state), ("save-state", arguments.save_state)):
        if given is not None:
            raise InputError(f"--{name}: given with a search among {settings.num_beams} texts; use --num-beams 1")
    if arguments.engine == "onnx":
        raise InputError(f"num_beams: {settings.num_beams} given, but the engine onnx searches no beams")
    check_run_files(arguments.run)
    run = load(arguments.run)
    from multilin.inference.generate_run import generate_text

    generate_text(run, prompt, settings, write=write, echo=arguments.echo)


def rollout(arguments: RolloutArguments, settings: RolloutSettings) -> None:
    """Feed the raw outputs of an all-linear model back as its inputs, all at once and one by one.

    Not the likeliest token is fed back but the whole vector of outputs; each is shown as its likeliest token.
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
    """Merge the adapters of a run with the model they belong to into a model of its own."""
    check_run_files(arguments.run)
    if not is_adapter(Path(arguments.run)):
        raise InputError(f"run: {arguments.run} holds a whole model and no adapters to merge")
    output = Path(arguments.output or beside(arguments.run, "-merged"))
    check_folder("--output", output, must_be_new=True)
    run = load(arguments.run)
    from multilin.runs.load import save_run

    save_run(run, output)
    say_next(["multilin", "generate", output], ["multilin", "info", output])


def convert(arguments: ConvertArguments) -> None:
    """Turn a checkpoint of another package into ours, with the same logits."""
    with loading():
        from multilin.inference.convert import convert_checkpoint
    convert_checkpoint(arguments.kind, Path(arguments.source), Path(arguments.output))
    say_next(["multilin", "info", arguments.output])


def _print_rollout(result: "RolloutResult") -> None:
    """Print both texts, their times and the difference of the vectors."""
    console = make_console()
    console.print(
        "Raw output vectors are fed back as inputs, not the likeliest token; each is shown as its likeliest.\n",
        soft_wrap=True,
    )
    for name, way in (("parallel", result.parallel), ("sequential", result.sequential)):
        text = repr(result.prompt + way.text)
        console.print(f"{name:11}{1e3 * way.seconds:10.2f} ms  {text}", soft_wrap=True, markup=False)
    console.print(
        f"\n{plural(result.num_steps, 'output')} after {plural(result.num_prompt_tokens, 'token')} in "
        f"{result.dtype}: parallel is {result.speedup:.1f} times as fast, the outputs differ by "
        f"{result.largest_difference:.1e} at most (relative)",
        soft_wrap=True,
    )
