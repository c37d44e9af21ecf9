"""The command line: find the verb, parse its arguments, call its function, and print a failure as a sentence.

The modules of the verbs import neither PyTorch nor other slow packages, so that help and error messages appear at once.
Each verb imports such packages after its arguments have been checked.
"""

import contextlib
import errno
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import multilin
from multilin.cli.chat import chat
from multilin.cli.check import check
from multilin.cli.compare import compare
from multilin.cli.demo import demo
from multilin.cli.evaluate import evaluate, quantize
from multilin.cli.explain import explain
from multilin.cli.export import export
from multilin.cli.inference import convert, generate, merge, rollout
from multilin.cli.info import doctor, info
from multilin.cli.messages import is_main_process, plain_warnings
from multilin.cli.plan import plan
from multilin.cli.publish import publish
from multilin.cli.serve import serve
from multilin.cli.text import prepare, tokenizer_show, tokenizer_train
from multilin.cli.train import train
from multilin.errors import InputError, nearest, system_error
from multilin.files.trust import trust_all
from multilin.ops.threads import following_load
from multilin.training.environment import drop_empty
from multilin.training.outcomes import TrainingFailed, TrainingInterrupted

BAD_INPUT, FAILED, INTERRUPTED, BROKEN_PIPE = 2, 1, 130, 141
FIRST_SECONDS = 5.0  # for which other processes of a machine wait, so that the first one reports bad input
HELP = ("-h", "--help", "help")
TRUST = "--trust-code"

_FUNCTIONS: tuple[Callable[..., None], ...] = (
    demo, prepare, plan, check, train, merge, generate, chat, serve, rollout, evaluate, compare, explain, quantize,
    export, publish, info, tokenizer_train, tokenizer_show, convert, doctor,
)  # fmt: skip
VERBS = {function.__name__.replace("_", " "): function for function in _FUNCTIONS}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status.

    The status is 0 for success, 1 for a failure, 2 for bad input, 130 if interrupted. stderr gets a sentence on errors.
    """
    if arguments is None:  # as a program: SIGTERM must remove half-written files, too
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        sys.unraisablehook = _repeat_signal
    # The shell may have closed them, as by 2>&-.
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115, PTH123
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115, PTH123
    if sys.stdout is None:
        return _fail("stdout is closed; redirect it to a file, or to /dev/null", FAILED)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows another one
    with plain_warnings():
        try:
            _run(list(sys.argv[1:] if arguments is None else arguments))
            sys.stdout.flush()
            return 0
        except InputError as error:
            if os.environ.get("LOCAL_RANK", "0") != "0":
                # Most likely the first process of this machine says the same, and torchrun then ends this one.
                time.sleep(FIRST_SECONDS)
            return _fail(str(error), BAD_INPUT)
        except TrainingInterrupted as error:
            return _fail(str(error), error.exit_code) if is_main_process() else error.exit_code
        except TrainingFailed as error:
            return _fail(str(error), FAILED)
        except KeyboardInterrupt:
            return _fail("interrupted", INTERRUPTED)
        except BrokenPipeError:  # the reader of stdout closed it
            _give_up_stdout()
            return BROKEN_PIPE
        except UnicodeEncodeError as error:
            around = error.object[max(error.start - 20, 0) : error.end]
            return _fail(f"{around!r} holds bytes that are not UTF-8", BAD_INPUT)
        except OSError as error:
            if error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                error.filename = "stdout"  # every other output is written to a file that has a name
            return _fail(system_error(error), BAD_INPUT if error.errno == errno.ENAMETOOLONG else FAILED)
        except SystemExit as end:  # after --help, or by rich when the reader of stdout closed it
            return BROKEN_PIPE if isinstance(end.__context__, BrokenPipeError) else int(end.code or 0)


def _run(arguments: list[str]) -> None:
    for argument in arguments:
        argument.encode()  # raises on bytes that are not UTF-8, which Python passes on as surrogates
    if TRUST in arguments:
        arguments.remove(TRUST)
        trust_all()
    if not arguments or arguments[0] in HELP:
        _print_overview(list(VERBS))
    elif (verbs := _verbs_after(arguments[0])) and arguments[1:2] and arguments[1] in HELP:
        _print_overview(verbs)
    elif arguments[0] == "--version":
        print(f"multilin {multilin.__version__}")
    else:
        verb, rest = _split(arguments)
        from multilin.cli.parser import parse

        drop_empty()
        given = parse(verb, VERBS[verb], rest)
        with following_load():
            VERBS[verb](*given)


def _split(arguments: list[str]) -> tuple[str, list[str]]:
    """Split the words into a verb, of one or two words, and its arguments."""
    for num_words in (2, 1):
        verb = " ".join(arguments[:num_words])
        if verb in VERBS:
            return verb, arguments[num_words:]
    parts = [verb.split()[1] for verb in _verbs_after(arguments[0])]
    if parts:
        given = f"{arguments[1]!r} given" if len(arguments) > 1 else "nothing given"
        raise InputError(f"{arguments[0]}: {given}, but it should be {' or '.join(parts)}")
    hint = nearest(arguments[0], VERBS) or f"; known are {', '.join(VERBS)}"
    raise InputError(f"{arguments[0]!r} is not a verb of multilin{hint}")


def _verbs_after(word: str) -> list[str]:
    """The verbs of two words that begin with this word."""
    return [verb for verb in VERBS if verb.startswith(f"{word} ")]


def _print_overview(verbs: list[str]) -> None:
    width = max(map(len, verbs))
    print("Train, run, explain and compare small language models with linear-time layers.\n")
    print("usage: multilin VERB ...\n")
    for verb in verbs:
        print(f"  {verb:{width}}  {(VERBS[verb].__doc__ or '').splitlines()[0]}")
    print("\nStart with `multilin demo`; `multilin VERB --help` shows the flags of a verb.")
    print("With `--trust-code`, a verb runs the Python code in a model's folder; read it first.")
    print("Set MULTILIN_ALLOCATOR=system to let glibc return freed memory to the system; multilin is then slower.")


def _repeat_signal(lost: Any) -> None:
    """Send a signal again if its exception was lost in `__del__` or in the callback of a weak reference."""
    number = {KeyboardInterrupt: signal.SIGINT, SystemExit: signal.SIGTERM}.get(lost.exc_type)
    if number is None:
        sys.__unraisablehook__(lost)
    else:
        # To the main thread, which may be waiting.
        threading.Timer(0.1, signal.pthread_kill, [threading.main_thread().ident, number]).start()


def _fail(message: str, status: int) -> int:
    with contextlib.suppress(OSError):
        print(f"multilin: {message}", file=sys.stderr)
    if sys.stdout is not None:
        _give_up_stdout()
    return status


def _give_up_stdout() -> None:
    """Flush stdout; if that fails, send the rest to /dev/null, so that Python prints no error when it exits."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
