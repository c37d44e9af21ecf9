"""Runs one malformed input in a process of its own, and says what is wrong with how the command line ended."""

import gc
import hashlib
import itertools
import multiprocessing.forkserver
import os
import re
import resource
import shutil
import stat
import sys
import tempfile
import unittest.mock
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from multilin.cli.main import BAD_INPUT, FAILED, main
from multilin.errors import LONGEST_MESSAGE

LIMIT_SECONDS, LIMIT_BYTES = 120, 4 * 2**30  # seconds on a busy machine; none takes more than a few on a quiet one
PRELOADED = """
    tests.fuzz.cases multilin.training.loop multilin.inference.generate multilin.inference.torch_engine
    multilin.analysis.explain.run
    multilin.analysis.explain.page multilin.analysis.compare.run multilin.analysis.quantize multilin.cli.parser
    multilin.inference.rollout multilin.inference.convert multilin.data.tokenizer_tools multilin.analysis.costs
    multilin.analysis.evaluate.run multilin.analysis.evaluate.tasks transformers.models.gpt2.modeling_gpt2
""".split()  # noqa: SIM905
"""Imported once, by the process that all others begin as copies of."""


@dataclass(frozen=True)
class Case:
    """A command with something wrong.

    words: the command line, which runs in a folder of its own with valid files.
    names: one of these must be in the message; nothing is asked of it where there are none.
    damage: what is done to the folder before.
    may_pass: whether the fault may go unseen, because it may be none; all else is asked as of any other case.
    must_pass: whether nothing is wrong.
    stdin, stdout: files to open as these.
    """

    words: list[str]
    names: tuple[str, ...] = ()
    damage: Callable[[Path], object] = lambda folder: None
    may_pass: bool = False
    must_pass: bool = False
    stdin: str = "/dev/null"
    stdout: str = ""

    def __str__(self) -> str:
        return " ".join(word if len(word) < 60 else f"{word[:28]}...{word[-28:]}" for word in self.words)


def _without_exporting(words: list[str]) -> list[str]:
    """Where no engine is given PyTorch generates: exporting every run takes longer than all else."""
    is_plain = words[:1] in (["generate"], ["chat"]) and not any(word.startswith("--engine") for word in words)
    return [*words, "--engine=torch"] if is_plain else words


class Runner:
    """Runs cases in copies of a folder with valid files."""

    def __init__(self, base: Path) -> None:
        self.base, self.valid = base, base / "valid"
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOADED)
        with unittest.mock.patch.dict(os.environ):
            multiprocessing.forkserver.ensure_running()
        self.numbers = itertools.count()

    def call(self, case: Case, folder: Path) -> tuple[int | None, str, str, int]:
        """Exit status (None: it hung), stdout, stderr and peak memory of a command that runs in a folder."""
        output = folder.with_name(f"{folder.name}-output")
        (output / "tmp").mkdir(parents=True)
        process = self.context.Process(target=_child, args=(case.words, folder, output, case.stdin, case.stdout))
        process.start()
        process.join(LIMIT_SECONDS)
        status = process.exitcode
        process.kill()
        process.join()
        stdout, stderr, peak = (
            (output / name).read_text(errors="backslashreplace") if (output / name).exists() else ""
            for name in ("stdout", "stderr", "peak")
        )
        if left := [*(output / "tmp").iterdir()]:
            stderr += f"\nleft in TMPDIR: {left}"
        shutil.rmtree(output)
        return status, stdout, stderr, int(peak or 0)

    def faults(self, case: Case) -> list[str]:
        """What is wrong with how a case ended: a word for the kind of each fault, and what was seen."""
        folder = self.base / f"case-{next(self.numbers)}"
        shutil.copytree(self.valid, folder, symlinks=True)
        os.mkfifo(folder / "fifo")
        (folder / "loop").symlink_to("loop")
        (folder / "empty").mkdir()
        case.damage(folder)
        before = _listing(folder)
        status, stdout, stderr, peak = self.call(case, folder)
        faults = list(_faults_of_text(case, status, stdout, stderr))
        changed = {name for name, *_ in before ^ _listing(folder)}
        changed = {name for name in changed if name.endswith(".partial") or (status and not name.startswith("cache"))}
        if peak > LIMIT_BYTES:
            faults.append(f"memory: {peak / 2**30:.1f} GB")
        if changed:
            faults.append(f"left over: {' '.join(sorted(changed)[:5])}; {stderr[-300:]}")
        shutil.rmtree(folder)
        return faults


def _child(words: list[str], folder: Path, output: Path, stdin: str, stdout: str) -> None:
    gc.freeze()  # a collection would write to, and so copy, all the memory that this process shares
    os.chdir(folder)
    places = {"XDG_CACHE_HOME": folder / "cache", "TMPDIR": output / "tmp", "HOME": folder}
    os.environ.update({name: str(path) for name, path in places.items()})
    tempfile.tempdir = None
    for number, path in enumerate((stdin, stdout or output / "stdout", output / "stderr")):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT if number else os.O_RDONLY, 0o600), number)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
    used = re.search(r"VmData:\s*(\d+)", Path("/proc/self/status").read_text())
    resource.setrlimit(resource.RLIMIT_DATA, (1024 * int(used[1]) + LIMIT_BYTES,) * 2)  # type: ignore[index]
    import torch

    torch.set_num_threads(1)
    try:
        status = main(_without_exporting(words))
    finally:
        (output / "peak").write_text(str(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))
    sys.stderr.flush()
    sys.exit(status)


def _faults_of_text(case: Case, status: int | None, stdout: str, stderr: str) -> Iterator[str]:
    shown = stderr[-1500:]
    lines = [line for line in stderr.splitlines() if not line.startswith("multilin: warning: ")]
    if status is None:
        yield f"hang: more than {LIMIT_SECONDS} seconds; {shown}"
    elif "Traceback" in stderr + stdout:
        yield f"traceback: {shown}"
    elif case.must_pass and status:
        yield f"refused: {shown}"
    elif status == 0 and not (case.may_pass or case.must_pass):
        yield f"accepted: {stdout[:200]} {shown}"
    elif status not in (0, FAILED, BAD_INPUT):
        yield f"status: {status}; {shown}"
    elif status and (len(lines) != 1 or not lines[0].startswith("multilin: ") or len(lines[0]) > LONGEST_MESSAGE + 10):
        yield f"sentence: {shown}"
    elif status and case.names and not any(name in lines[0] for name in case.names):
        yield f"unnamed: {' '.join(case.names)} not in {shown}"
    if noise := re.search(r"\w*Warning: .*|left in TMPDIR.*", stderr):
        yield f"noise: {noise[0]}"


def _listing(folder: Path) -> set[tuple[str, int, str]]:
    """Every path in a folder, its kind, and a hash of a file or the end of a link."""
    listing = set()
    for path in folder.rglob("*"):
        kind, content = stat.S_IFMT(path.lstat().st_mode), str(path.readlink()) if path.is_symlink() else ""
        if kind == stat.S_IFREG and path.stat().st_size < 2**24:
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        listing.add((str(path.relative_to(folder)), kind, content))
    return listing
