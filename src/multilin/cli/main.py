"""The command line: finds the verb, parses its arguments, calls it, and turns failures into a sentence.

The modules of verbs import neither PyTorch nor anything else that takes long, so that help and mistakes are answered at
once; each verb imports what it needs when its arguments are known to be right.
"""

import io
import os
import sys
from collections.abc import Callable, Sequence

import multilin
from multilin.cli.compare import compare
from multilin.cli.demo import demo
from multilin.cli.doctor import doctor
from multilin.cli.evaluate import evaluate, quantize
from multilin.cli.explain import explain
from multilin.cli.inference import convert, generate, rollout
from multilin.cli.info import info
from multilin.cli.messages import plain_warnings
from multilin.cli.tokenizer import tokenizer_show, tokenizer_train
from multilin.cli.train import train
from multilin.errors import InputError, nearest
from multilin.training.outcomes import TrainingFailed, TrainingInterrupted

BAD_INPUT, FAILED, INTERRUPTED, BROKEN_PIPE = 2, 1, 130, 141

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
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows another one
    with plain_warnings():
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
        from multilin.cli.parser import parse

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
    print("MULTILIN_ALLOCATOR=system in the environment leaves the settings of glibc's memory allocator alone.")


def _fail(message: str, status: int) -> int:
    print(f"multilin: {message}", file=sys.stderr)
    return status
