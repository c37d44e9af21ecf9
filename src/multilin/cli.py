"""The command line: one function per verb, which parses and calls."""

import dataclasses
import functools
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console

import multilin
from multilin import allocator
from multilin.analysis.compare.verb import compare
from multilin.analysis.evaluate_run import EvaluationSettings
from multilin.analysis.info import ModelSizes
from multilin.analysis.verbs import evaluate, explain
from multilin.arguments import POSITIONAL, parse
from multilin.errors import InputError, nearest
from multilin.inference.generate import GenerationSettings
from multilin.inference.rollout_run import RolloutSettings
from multilin.messages import plain_messages, say_next
from multilin.settings import settings
from multilin.threads import warn_of_contention
from multilin.tokenizer_tools import TokenizerSettings
from multilin.training.outcomes import TrainingFailed, TrainingInterrupted
from multilin.training.recipe import Changes

BAD_INPUT, FAILED, INTERRUPTED, BROKEN_PIPE = 2, 1, 130, 141


@settings
class TrainArguments:
    """What to train."""

    recipe: Annotated[str | None, POSITIONAL] = None  # built-in recipe, YAML file or run folder; else the defaults
    resume: bool = False  # continue the run in the output folder at its last checkpoint
    overwrite: bool = False  # replace the run in the output folder


@settings
class GenerateArguments:
    """What to continue."""

    run: str  # folder of a trained model
    prompt: str | None = None  # text to continue; without one it is read from a pipe, or the model begins a text
    prompt_file: str | None = None  # file with the text to continue; one newline at its end is left out
    state: str | None = None  # go on from the state in this file; the prompt, if any, is added to its text
    save_state: str | None = None  # write the state after the last token to this file, to go on from
    echo: bool = True  # also write the prompt itself to stdout


@settings
class RolloutArguments:
    """What to go on from."""

    run: str  # folder of a trained model, all of it linear
    prompt: str | None = None  # text to go on from; without one it is read from a pipe
    prompt_file: str | None = None  # file with the text to go on from; one newline at its end is left out
    json: bool = False  # print JSON


@settings
class QuantizeArguments:
    """What to round."""

    run: str  # folder of a trained model
    output: str | None = None  # folder for the int8 model; without one RUN-int8


@settings
class InfoArguments:
    """What to describe."""

    model: str  # folder of a trained model, or the name of an architecture
    json: bool = False  # print JSON


@settings
class DoctorArguments:
    """How to report."""

    json: bool = False  # print JSON


@settings
class ConvertArguments:
    """What to convert."""

    kind: str  # where the checkpoint comes from: fastformer
    source: str  # its folder
    output: str  # folder to write ours to


@settings
class TokenizerArguments:
    """What to show."""

    tokenizer: str  # folder with a tokenizer.json, run folder, or name on the hub
    source: str | None = None  # count tokens and bytes of this text
    text: str | None = None  # show how this text is cut
    json: bool = False  # print JSON


def train(what: TrainArguments, changes: Changes) -> None:
    """Train a language model.

    A recipe decides everything; any of its fields can be changed: `multilin train demo --training.max_steps 50`.
    `multilin info ARCHITECTURE` lists the options of an architecture
    (--model.options.num_heads 8, or --model.options '{"num_heads": 8}').
    """
    from multilin.training.recipe import load_recipe
    from multilin.training.trainer import train

    warn_of_contention()
    result = train(load_recipe(what.recipe, changes), resume=what.resume, overwrite=what.overwrite)
    say_next(f"multilin generate {result.output} --prompt 'The'", f"multilin evaluate {result.output}")


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
        print(_as_json(found))
        return
    print_rollout(found, Console(highlight=False))
    say_next(f"multilin generate {what.run}", f"multilin info {what.run}")


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
        print(_as_json(found))
        return
    print_info(found, Console(highlight=False))
    if architecture is not None:
        print_options(architecture, Console(highlight=False))


def doctor(what: DoctorArguments) -> None:
    """Show what this machine offers and which implementation every op will use."""
    from multilin.doctor import examine, print_checkup

    found = examine()
    if what.json:
        print(_as_json(found))
    else:
        print_checkup(found, Console(highlight=False))


def convert(what: ConvertArguments) -> None:
    """Turn a checkpoint of another package into ours, with the same logits."""
    from multilin.inference.convert import CONVERTERS

    if what.kind not in CONVERTERS:
        hint = nearest(what.kind, CONVERTERS) or f"; known are {', '.join(CONVERTERS)}"
        raise InputError(f"KIND: {what.kind!r} is not known{hint}")
    CONVERTERS[what.kind](Path(what.source), Path(what.output))
    say_next(f"multilin info {what.output}")


def tokenizer_train(what: TokenizerSettings) -> None:
    """Train a tokenizer on a text and save it to a folder."""
    from multilin.tokenizer_tools import train_into_folder

    tokenizer = train_into_folder(what)
    print(f"{len(tokenizer):,} tokens in {what.output}")
    say_next(
        f"multilin tokenizer show {what.output} --source {what.source}",
        f"multilin train --data.source {what.source} --tokenizer.path {what.output}",
    )


def tokenizer_show(what: TokenizerArguments) -> None:
    """Show a tokenizer: its vocabulary, its special tokens, and how it cuts a text."""
    from multilin.tokenizer_tools import describe_tokenizer, print_tokenizer

    found = describe_tokenizer(what.tokenizer, source=what.source, text=what.text)
    if what.json:
        print(_as_json(found))
    else:
        print_tokenizer(found, Console(highlight=False))


def demo(changes: Changes) -> None:
    """Train a small model on text that is already on this machine, compare it, and read what it writes.

    It takes about two minutes on two cores. A demo that ran before is replaced.
    """
    from multilin.demo import PROMPT, run_demo

    warn_of_contention()
    result = run_demo(changes)
    say_next(f"multilin generate {result.output} --prompt {PROMPT!r}", f"multilin info {result.output}")


VERBS: dict[str, Callable[..., None]] = {
    "demo": demo,
    "train": train,
    "generate": generate,
    "rollout": rollout,
    "evaluate": evaluate,
    "compare": compare,
    "explain": explain,
    "quantize": quantize,
    "info": info,
    "tokenizer train": tokenizer_train,
    "tokenizer show": tokenizer_show,
    "convert": convert,
    "doctor": doctor,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the result is the exit status.

    0 done; 1 the work failed; 2 bad input; 130 interrupted; each failure is one sentence on stderr.
    """
    allocator.keep_freed_memory()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows another one
    with plain_messages():
        try:
            _run(list(sys.argv[1:] if arguments is None else arguments))
            sys.stdout.flush()
            return 0
        except InputError as error:
            return _fail(str(error), BAD_INPUT)
        except TrainingInterrupted as error:
            return _fail(str(error), error.exit_code)
        except TrainingFailed as error:
            return _fail(str(error), FAILED)
        except KeyboardInterrupt:
            return _fail("interrupted", INTERRUPTED)
        except BrokenPipeError:
            # The reader has enough; Python would complain again when it flushes stdout at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return BROKEN_PIPE
        except SystemExit as end:  # after --help
            return int(end.code or 0)


def _run(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        _print_overview()
    elif arguments[0] == "--version":
        print(f"multilin {multilin.__version__}")
    else:
        verb, rest = _split(arguments)
        VERBS[verb](*parse(verb, VERBS[verb], rest))


def _split(arguments: list[str]) -> tuple[str, list[str]]:
    """The verb, of one or two words, and its arguments."""
    for num_words in (2, 1):
        verb = " ".join(arguments[:num_words])
        if verb in VERBS:
            return verb, arguments[num_words:]
    parts = [verb.split()[1] for verb in VERBS if verb.startswith(f"{arguments[0]} ")]
    if parts:
        given = f"{arguments[1]!r} given" if len(arguments) > 1 else "nothing given"
        raise InputError(f"{arguments[0]}: {given}, but it should be {' or '.join(parts)}")
    hint = nearest(arguments[0], VERBS) or f"; known are {', '.join(VERBS)}"
    raise InputError(f"{arguments[0]!r} is no verb of multilin{hint}")


def _print_overview() -> None:
    width = max(map(len, VERBS))
    print("Train, run, explain and compare small language models with linear-time layers.\n")
    print("usage: multilin VERB ...\n")
    for verb, function in VERBS.items():
        print(f"  {verb:{width}}  {(function.__doc__ or '').splitlines()[0]}")
    print("\nStart with `multilin demo`; `multilin VERB --help` shows the flags of a verb.")
    print(f"{allocator.VARIABLE}=system in the environment leaves the settings of glibc's memory allocator alone.")


def _fail(message: str, status: int) -> int:
    print(f"multilin: {message}", file=sys.stderr)
    return status


def _as_json(found: Any) -> str:
    return json.dumps(dataclasses.asdict(found), indent=2, ensure_ascii=False)
