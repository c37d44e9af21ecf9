"""The helper that starts programs: a failure shows what the program printed, on both streams."""

import signal
import subprocess

import pytest

from tests.processes import PYTHON, run, running

SPEAKS = "import sys; print('to stdout', flush=True); print('to stderr', file=sys.stderr, flush=True); "


def test_a_failed_program_shows_what_it_printed() -> None:
    run([*PYTHON, "-c", f"{SPEAKS} sys.exit(3)"], status=3)
    with pytest.raises(AssertionError) as failure:
        run([*PYTHON, "-c", f"{SPEAKS} sys.exit(3)"])
    (note,) = failure.value.__notes__
    assert note.startswith("status 3 of ")
    assert "to stdout\nto stderr\n" in note


def test_a_program_that_takes_too_long_is_ended() -> None:
    sleeping = [*PYTHON, "-c", "import time; time.sleep(600)"]
    with pytest.raises(subprocess.TimeoutExpired):
        run(sleeping, limit=0.1)
    with running(sleeping) as process:
        pass
    assert process.returncode == -signal.SIGTERM
