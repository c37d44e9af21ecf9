"""Read prompts, and print messages on stderr: warnings, and the commands to type next."""

import contextlib
import dataclasses
import gc
import importlib.util
import json
import os
import shlex
import shutil
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from logging import ERROR, getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multilin.errors import InputError
from multilin.settings.inputs import MEGABYTE, check_encoding, read_bytes, to_json

if TYPE_CHECKING:
    from multilin.runs.load import Run
    from multilin.training.recipe import Recipe

LARGEST_PROMPT = 16 * MEGABYTE


@contextlib.contextmanager
def plain_warnings() -> Iterator[None]:
    """Show each warning on one line without its place in the code, and only in the first process of each machine."""
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: (
            print(f"multilin: warning: {message}", file=sys.stderr) if is_first else None
        )
        yield


@contextlib.contextmanager
def loading(name: str = "") -> Iterator[None]:
    """Import PyTorch and transformers, which takes seconds, and show a message on a terminal until the block ends.

    Afterwards transformers and the hub's client print neither progress bars nor remarks, and freed memory stays in the
    process.

    Args:
        name: the thing that the message names; PyTorch if empty.
    """
    with contextlib.ExitStack() as stack:
        if is_main_process() and sys.stderr.isatty():
            from rich.console import Console

            stack.enter_context(Console(stderr=True).status(f"loading {name or 'PyTorch'} ..."))
        # Imported objects stay alive; garbage collections that scan them take a quarter of the time of the imports.
        gc.disable()
        stack.callback(gc.enable)
        from transformers.utils import logging

        from multilin.analysis.machine import keep_freed_memory

        keep_freed_memory()
        logging.disable_progress_bar()
        logging.set_verbosity_error()
        getLogger("huggingface_hub").setLevel(ERROR)
        yield


def load(folder: str | Path) -> "Run":
    """Load a run, and show a message on a terminal meanwhile; see `load_run`."""
    with loading(f"PyTorch and {folder}"):
        from multilin.runs.load import load_run

        return load_run(folder)


def read_recipe(name_or_path: str | None, changes: Mapping[str, Any]) -> "Recipe":
    """Load a recipe with changes, and warn of fields that another choice replaces; see `load_recipe`."""
    from multilin.training.recipe import left_out_fields, load_recipe

    recipe = load_recipe(name_or_path, changes)
    if is_main_process() and (names := left_out_fields(name_or_path, changes, recipe)):
        dropped = f"fields of the recipe are dropped, because another choice replaces them: {', '.join(names)}"
        print(f"multilin: warning: {dropped}", file=sys.stderr)
    return recipe


def check_installed(user: str, extra: str, *modules: str) -> None:
    """Refuse to run if a module is missing that `user` needs; the optional dependency `extra` installs the modules."""
    for name in modules:
        if importlib.util.find_spec(name) is None:
            raise InputError(f"{user} needs {name}, which is not installed; pip install 'multilin[{extra}]'")


def say_next(*commands: Sequence[object]) -> None:
    """Print on stderr the commands that a user may type next; only one process of a run prints them.

    Args:
        commands: the words of each command; they are quoted for a shell before printing. If the shell does not find
            `multilin`, a first word `multilin` becomes the path of the running program.
    """
    if is_main_process():
        typed = (
            shlex.join([_program() if first == "multilin" else str(first), *map(str, rest)])
            for first, *rest in commands
        )
        print("\nNext:", *typed, sep="\n  ", file=sys.stderr)


def as_flags(values: Mapping[str, Any]) -> list[str]:
    """Names and values as the words of a command line; values that are None are left out."""
    words = []
    for name, value in values.items():
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        words += [] if value is None else [f"--{name}", value if isinstance(value, str) else json.dumps(value)]
    return words


def is_main_process() -> bool:
    """True in one of the processes that torchrun or accelerate started, and False in the others."""
    return os.environ.get("RANK", "0") == "0"


def _program() -> str:
    called = Path(sys.argv[0])
    if shutil.which("multilin") or called.name != "multilin":
        return "multilin"
    return os.path.relpath(called) if called.is_relative_to(Path.cwd()) else str(called)


def as_json(result: Any) -> str:
    """A dictionary, or a dataclass and the dataclasses in it, as indented JSON; nan and infinity are null."""
    plain = dataclasses.asdict(result) if not isinstance(result, dict) else result
    return to_json(plain, indent=2, ensure_ascii=False)


def read_prompt(
    prompt: str | None, prompt_file: str | None, names: tuple[str, str] = ("--prompt", "--prompt-file")
) -> str:
    """The prompt if given, else the text of the file, else the text piped into stdin, else an empty text.

    One newline at the end of a file or pipe, which editors and `echo` add, is dropped. `names` are the flags that gave
    `prompt` and `prompt_file`, for messages.

    Raises:
        InputError: `prompt` and `prompt_file` are both given; or the text is longer than LARGEST_PROMPT bytes, is not
            UTF-8, or is in a file that is not regular or cannot be read.
    """
    if prompt is not None and prompt_file is not None:
        raise InputError(f"{names[1]}: given together with {names[0]}; give one of them")
    if prompt is not None:
        return prompt
    if prompt_file is not None:
        return _decode(read_bytes(prompt_file, names[1], LARGEST_PROMPT), f"{names[1]}: {prompt_file}")
    if not sys.stdin.isatty():
        content = sys.stdin.buffer.read(LARGEST_PROMPT + 1)
        if len(content) > LARGEST_PROMPT:
            megabytes = LARGEST_PROMPT // MEGABYTE
            raise InputError(f"the prompt on stdin is longer than {megabytes} MB, the size limit")
        return _decode(content, "the prompt on stdin")
    return ""


def _decode(content: bytes, name: str) -> str:
    check_encoding(content[:4096], name)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{name} is not UTF-8: byte {error.start} is 0x{content[error.start]:02x}") from None
    return text.removesuffix("\n").removesuffix("\r")
