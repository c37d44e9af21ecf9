"""The verbs of the command line that run a trained model, and the one that brings it here."""

import functools
import sys
from pathlib import Path

from rich.console import Console

from multilin.errors import InputError, nearest
from multilin.inference.generate import GenerationSettings
from multilin.inference.rollout_run import RolloutSettings
from multilin.messages import as_json, say_next
from multilin.settings import settings
from multilin.settings.bounds import PathText, Prose


@settings
class GenerateArguments:
    """What to continue."""

    run: PathText  # folder of a trained model
    prompt: Prose | None = None  # text to continue; without one it is read from a pipe, or the model begins a text
    prompt_file: PathText | None = None  # file with the text to continue; one newline at its end is left out
    state: PathText | None = None  # go on from the state in this file; the prompt, if any, is added to its text
    save_state: PathText | None = None  # write the state after the last token to this file, to go on from
    echo: bool = True  # also write the prompt itself to stdout


@settings
class RolloutArguments:
    """What to go on from."""

    run: PathText  # folder of a trained model, all of it linear
    prompt: Prose | None = None  # text to go on from; without one it is read from a pipe
    prompt_file: PathText | None = None  # file with the text to go on from; one newline at its end is left out
    json: bool = False  # print JSON


@settings
class ConvertArguments:
    """What to convert."""

    kind: str  # where the checkpoint comes from: fastformer
    source: PathText  # its folder
    output: PathText  # folder to write ours to


def generate(what: GenerateArguments, how: GenerationSettings) -> None:
    """Write text with a trained model, streamed as it comes.

    stdout gets the text alone: the prompt and what follows it.
    """
    from multilin.inference.prompts import read_prompt
    from multilin.inference.runs import load_run
    from multilin.inference.session import write_text

    run = load_run(what.run)
    prompt = read_prompt(what.prompt, what.prompt_file)
    write = functools.partial(print, end="", flush=True)
    write_text(run, prompt, how, state=what.state, save_state=what.save_state, echo=what.echo, write=write)
    if sys.stdout.isatty():
        print()
    if what.save_state:
        say_next(f"multilin generate {what.run} --state {what.save_state}")
    else:
        say_next(f"multilin generate {what.run} --save-state text.state", f"multilin evaluate {what.run}")


def rollout(what: RolloutArguments, how: RolloutSettings) -> None:
    """Feed the raw outputs of an all-linear model back as its inputs, all at once and one by one.

    Not the likeliest token is fed back but the whole vector of outputs; each is shown as its likeliest token.
    """
    from multilin.inference.prompts import read_prompt
    from multilin.inference.rollout_run import print_rollout, rollout_run
    from multilin.inference.runs import load_run

    prompt = read_prompt(what.prompt, what.prompt_file)
    found = rollout_run(load_run(what.run), prompt, how)
    if what.json:
        print(as_json(found))
        return
    print_rollout(found, Console(highlight=False))
    say_next(f"multilin generate {what.run}", f"multilin info {what.run}")


def convert(what: ConvertArguments) -> None:
    """Turn a checkpoint of another package into ours, with the same logits."""
    from multilin.inference.convert import CONVERTERS

    if what.kind not in CONVERTERS:
        hint = nearest(what.kind, CONVERTERS) or f"; known are {', '.join(CONVERTERS)}"
        raise InputError(f"KIND: {what.kind!r} is not known{hint}")
    CONVERTERS[what.kind](Path(what.source), Path(what.output))
    say_next(f"multilin info {what.output}")
