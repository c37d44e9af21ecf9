"""Programs that tests start in processes of their own: what they print is shown when a test with them fails."""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[1]
PYTHON = [sys.executable, "-W", "ignore"]


def torchrun(number: int, *words: str) -> list[str]:
    """The command that starts a program in so many processes that train together."""
    return [*PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(number), *words]


class Program(subprocess.Popen[bytes]):
    """A program that runs in the project's folder and prints into a file."""

    def __init__(self, command: list[str], environment: Mapping[str, str] | None, output: IO[bytes]) -> None:
        super().__init__(command, env=environment, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        self.output = output

    def printed(self) -> str:
        """All it has printed so far, on stdout and stderr."""
        file = self.output.fileno()
        # Not by reading on, which would move the place where the program, which has the same file, writes next.
        return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")


@contextlib.contextmanager
def running(command: list[str], environment: Mapping[str, str] | None = None) -> Iterator[Program]:
    """A program that is ended at the end of the block; an exception inside carries what it printed."""
    with tempfile.TemporaryFile() as output:
        program = Program(command, environment, output)
        try:
            yield program
        except BaseException as error:
            error.add_note(f"status {program.poll()} of {command}, which printed:\n{program.printed()}")
            raise
        finally:
            program.terminate()  # torch.distributed.run ends its workers then
            try:
                program.wait(30)
            except subprocess.TimeoutExpired:
                program.kill()
                program.wait()


def run(
    command: list[str], *, environment: Mapping[str, str] | None = None, status: int = 0, limit: float = 600
) -> str:
    """Run a program to its end, which must have this status and come within `limit` seconds; return its output."""
    with running(command, environment) as program:
        assert program.wait(limit) == status
        return program.printed()
