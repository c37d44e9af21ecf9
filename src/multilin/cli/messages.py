"""What the command line prints beside tables: results as JSON, and on stderr warnings and what to type next."""

import contextlib
import dataclasses
import json
import os
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers.utils import logging


@contextlib.contextmanager
def plain_messages() -> Iterator[None]:
    """Warnings in one line without a place in the code, and no bars and remarks of transformers around ours."""
    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: print(f"multilin: warning: {message}", file=sys.stderr)
        logging.disable_progress_bar()
        logging.set_verbosity_error()
        try:
            yield
        finally:
            logging.set_verbosity(verbosity)
            if bars:
                logging.enable_progress_bar()


@contextlib.contextmanager
def no_progress_bars() -> Iterator[None]:
    """transformers draws no bars, such as save_pretrained's, which would go through ours."""
    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


def say_next(*commands: str) -> None:
    """Say what to type next, on stderr, once for all processes of a run.

    Args:
        commands: beginning with `multilin`, which becomes the path it was called by if the shell does not find it.
    """
    if os.environ.get("RANK", "0") == "0":
        typed = (command.replace("multilin", _program(), 1) for command in commands)
        print("\nNext:", *typed, sep="\n  ", file=sys.stderr)


def _program() -> str:
    called = Path(sys.argv[0])
    if shutil.which("multilin") or called.name != "multilin":
        return "multilin"
    return os.path.relpath(called) if called.is_relative_to(Path.cwd()) else str(called)


def as_json(found: Any) -> str:
    """The fields of a dataclass, and of those in it, as indented JSON."""
    return json.dumps(dataclasses.asdict(found), indent=2, ensure_ascii=False)
