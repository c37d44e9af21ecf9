"""The command line: finds the verb, parses its arguments, calls it, and turns failures into a sentence."""

import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

from rich.console import Console

import multilin
from multilin import allocator
from multilin.analysis.compare.verb import compare
from multilin.analysis.verbs import evaluate, explain, info, quantize
from multilin.arguments import POSITIONAL, parse
from multilin.errors import InputError, nearest
from multilin.inference.verbs import convert, generate, rollout
from multilin.messages import as_json, plain_messages, say_next
from multilin.settings import settings
from multilin.settings.bounds import PathText, Prose
from multilin.threads import warn_of_contention
from multilin.tokenizer_tools import TokenizerSettings
from multilin.training.outcomes import TrainingFailed, TrainingInterrupted
from multilin.training.recipe import Changes

BAD_INPUT, FAILED, INTERRUPTED, BROKEN_PIPE = 2, 1, 130, 141


@settings
class TrainArguments:
    """What to train."""

    recipe: Annotated[PathText | None, POSITIONAL] = None  # built-in recipe, YAML file or run folder; else the defaults
    resume: bool = False  # continue the run in the output folder at its last checkpoint
    overwrite: bool = False  # replace the run in the output folder


@settings
class DoctorArguments:
    """How to report."""

    json: bool = False  # print JSON


@settings
class TokenizerArguments:
    """What to show."""

    tokenizer: PathText  # folder with a tokenizer.json, run folder, or name on the hub
    source: PathText | None = None  # count tokens and bytes of this text
    text: Prose | None = None  # show how this text is cut
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


def doctor(what: DoctorArguments) -> None:
    """Show what this machine offers and which implementation every op will use."""
    from multilin.doctor import examine, print_checkup

    found = examine()
    if what.json:
        print(as_json(found))
    else:
        print_checkup(found, Console(highlight=False))


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
        print(as_json(found))
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
