"""Every command of the pages runs, small and in order, in a folder with stand-ins for what the page begins with.

A command runs unless it is in `ELSEWHERE`, with the reason. `forks.SMALLER` makes calls of multilin small.
"""

import itertools
import json
import os
import pydoc_data.topics
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import pytest

from multilin.export.web import RUNTIME_FILES, RUNTIME_VERSION
from tests.docs import forks
from tests.docs.pages import PAGES, ROOT, Block, blocks, commands, name_of, simple_commands
from tests.processes import PYTHON
from tests.processes import run as run_program

pytestmark = pytest.mark.slow

LIMIT = 600  # seconds of a page
ELSEWHERE = {  # what a command begins with or holds, as a regular expression, to the reason why it does not run here
    r"(^|/|\s)pip install": "reads an index of packages",
    r"^(cd|git|ssh|scp|rsync|source|python3? -m venv) ": "works on a checkout, or on another machine",
    r"^(less|open|xdg-open|tensorboard)\b": "shows something until it is closed",
    r"^(curl|wget) .*https://": "needs the network",
    r"(^|[\s=])/(shared|runs|data|mnt|models?)/": "needs the disks of a cluster",
    r"^make ": "tests, or a program that runs for minutes; tests/docs/test_pages.py looks up the target",
    r"-m (build|pytest)\b": "tests, and what tests/cli/test_release.py builds",
    r"-m benchmarks\b": "measures; tests/benchmarks runs each",
    r"docs/generate\.py": "writes into docs/; tests/docs/test_pages.py compares what it writes",
    r"^(podman|docker|kubectl|helm|systemctl|nginx|caddy)\b": "needs a container or a service manager",
    r"\b(sbatch|srun|scontrol)\b": "needs Slurm",
    r"--nnodes [2-9]|--rdzv-endpoint": "needs several machines",
    r"^hf |^huggingface-cli|--upload": "sends to the hub",
    r"\bserve run\b": "needs a cluster of Ray; tests/serving/test_ray_app.py runs it",
    r"s3://|gs://": "needs an object store",
    r"--tasks lambada|--tasks \w*hellaswag|pretrained=": "downloads a task of lm-eval; tests/analysis runs local ones",
    r"\w_mean\b": "is saved into the package; tests/docs/test_own_layer.py runs it",
}
# A file that the commands of a page use.
SAVED = r"[Ss]ave this(?: file)? as `(\w+\.py)`[^`]*\n```python\n(.*?)```"
UNTRIED = {  # the same for programs in Python: a line of theirs
    "docs/tutorial.md": "tests/docs/test_tutorial.py runs the notebook",
    "docs/own-layer.md": "tests/docs/test_own_layer.py runs the files",
    "train_on_ray": "needs a cluster of Ray; tests/training runs it",
    "someone/": "loads from the hub; tests/export/test_publish.py loads such a folder",
    "parameter_groups(model": "continues a program of the reader",
}
SERVERS = {  # commands that run until they are stopped, and the words that give them a port
    r"^(\S*/)?multilin serve": "--port {port}",
    r"-m http\.server": "{port}",
}
WRITTEN = {"--output", "--folder", "--save-state", "-o", ">", "--save"}  # flags of what a command makes
TASK = """\
task: my_task
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: loglikelihood
doc_to_text: "It was"
doc_to_target: " written"
metric_list: [{metric: perplexity}]
"""
RECIPE = "model: {architecture: elita, n_positions: 64}\ndata: {source: my-books/}\noutput: runs/mine\n"
SWEEP = """\
base: {data.source: my-books/, model.n_positions: 64}
rows: {elita: {model.architecture: elita}, gpt2: {model.architecture: gpt2}}
budget: {tokens: 4000}
output: runs/sweep
"""


class Base(NamedTuple):
    """What is made once: stand-ins to copy, programs for the PATH, and the environment of commands."""

    folder: Path
    environment: dict[str, str]


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Base]:
    """A server of programs, the texts, and a trained run."""
    folder = tmp_path_factory.mktemp("pages")
    forks.stand_in(folder / "bin")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "PYTEST"))} | {
        "PATH": f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}", "FORKS": str(folder / "socket"),
        "PYTHONPATH": f"{ROOT / 'src'}", "XDG_CACHE_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "RUNTIME": str(folder / "runtime"),
        "XDG_CONFIG_HOME": str(folder / "config"),
    }  # fmt: skip
    write_texts(folder)
    curl = f'#!/bin/sh\nexec {shutil.which("curl")} --fail-with-body --no-progress-meter "$@"\n'
    (folder / "bin" / "curl").write_text(curl)
    (folder / "bin" / "curl").chmod(0o755)
    server = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.docs.forks", environment["FORKS"]], cwd=ROOT, env=environment
    )
    try:
        while not (folder / "socket").exists():
            assert server.poll() is None
            time.sleep(0.1)
        train = "multilin train --data.source my-books/ --output run"
        subprocess.run(["bash", "-c", train], cwd=folder, env=environment, check=True)
        yield Base(folder, environment)
    finally:
        server.terminate()
        server.wait()


def write_texts(folder: Path) -> None:
    """A folder of English texts and files of other kinds, each a few kilobytes."""
    texts = [text for _, text in sorted(pydoc_data.topics.topics.items())[:24]]
    (folder / "my-books").mkdir()
    for number, text in enumerate(texts):
        (folder / "my-books" / f"{number}.txt").write_text(text[:1500])
    (folder / "text.txt").write_text("\n\n".join(texts)[:40_000])
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text[:1500]}) + "\n" for text in texts))
    with (folder / "chats.jsonl").open("w") as file:
        for number, text in enumerate(texts):
            answer = {"role": "assistant", "content": text[:200]}
            file.write(json.dumps({"messages": [{"role": "user", "content": f"Topic {number}?"}, answer]}) + "\n")
    (folder / "chapter.txt").write_text(texts[0][:200])
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "sweep.yaml").write_text(SWEEP)
    (folder / "runtime").mkdir()
    for name in RUNTIME_FILES:
        (folder / "runtime" / name).write_text(f"/* v{RUNTIME_VERSION}\n */")
    (folder / "tasks").mkdir()
    (folder / "tasks" / "my_task.yaml").write_text(TASK % (folder / "text.jsonl"))


STAND_INS = {  # names in commands to what is copied there, the first that matches
    "*chat*.jsonl": "chats.jsonl",
    "*.jsonl": "text.jsonl",
    "chapter.txt": "chapter.txt",
    "*.txt": "text.txt",
    "*sweep*.yaml": "sweep.yaml",
    "*.yaml": "recipe.yaml",
    "tasks*": "tasks",
    "runs/*": "run",
    "books/*": "my-books",
    "*/": "my-books",
}


def stand_ins(page: Path) -> dict[str, str]:
    """What a page's commands and programs read and do not make themselves, to what is copied there."""
    found, made = {"my-books": "my-books"}, set()
    for words in itertools.chain.from_iterable(words_of(page, block) for block in blocks(page)):
        read = [word for before, word in itertools.pairwise(["", *words]) if before not in WRITTEN]
        for name in re.split(r"[=,{}: \"']+", " ".join(read)):
            source = next((source for pattern, source in STAND_INS.items() if fnmatch(name, pattern)), None)
            is_made = not made.isdisjoint(map(str, [Path(name), *Path(name).parents]))
            if source and not is_made and not name.startswith(("-", "/", "$")):
                found.setdefault(name.rstrip("/"), source)
        made |= {str(Path(word)) for before, word in itertools.pairwise(words) if before in WRITTEN}
    return found


def words_of(page: Path, block: Block) -> Iterator[list[str]]:
    """The words of each command of a block that runs here; for Python its texts without spaces."""
    if is_typed(block):
        for command in commands(block.text):
            yield from [] if reason(command) else simple_commands(command)
    elif block.language == "python" and not untried(page, block.text):
        yield re.findall(r'"([^"\s]+)"', block.text)


def is_typed(block: Block) -> bool:
    """True for commands; a block that begins with #! is a script for a batch system."""
    return block.language == "bash" and not block.text.startswith("#!")


def reason(command: str) -> str | None:
    """Why a command does not run here."""
    return next((reason for pattern, reason in ELSEWHERE.items() if re.search(pattern, command)), None)


def untried(page: Path, program: str) -> str | None:
    """Why a program of a page does not run here."""
    return next((reason for text, reason in UNTRIED.items() if text == name_of(page) or text in program), None)


def script(page: Path, port: int) -> str:
    """A page as a script of bash: programs in Python are files with those before them, as in one session."""
    lines = [
        "set -eo pipefail",
        "server=",
        'stop() { [ -z "$server" ] || { kill $server; wait $server || true; server=; }; }',
    ]
    programs: list[str] = []
    for block in blocks(page):
        if is_typed(block):
            for command in commands(block.text):
                if not reason(command):
                    lines += run(command.replace(":8000", f":{port}"), port)
        elif block.language == "python" and not untried(page, block.text):
            programs.append(block.text.replace(":8000", f":{port}"))
            name = f"program{len(programs)}.py"
            lines += [f"cat > {name} <<'PROGRAM'", *programs, "PROGRAM", *run(f"python {name}", port)]
    return "\n".join([*lines, "stop", ""])


def run(command: str, port: int) -> list[str]:
    """The lines that run a command, with a line of text on stdin where it may read one; a server is waited for."""
    shown = ["cat >&2 <<'SHOWN'", f"$ {command}", "SHOWN"]
    for pattern, words in SERVERS.items():
        if re.search(pattern, command):
            wait = f"until (: < /dev/tcp/127.0.0.1/{port}) 2> /dev/null; do kill -0 $server; sleep 0.2; done"
            return ["stop", *shown, f"{command.split('  #')[0]} {words.format(port=port)} &", "server=$!", wait]
    stdin = "<<< 'It was'" if re.search(r"multilin (generate|chat)", command) else "< /dev/null"
    return [*shown, "{", command, f"}} {stdin}", 'echo "  ($SECONDS s)" >&2']


def free_port() -> int:
    """A port that no program listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.mark.parametrize("page", [page for page in PAGES if not name_of(page).startswith("results/")], ids=name_of)
def test_the_commands_run(page: Path, base: Base, tmp_path: Path) -> None:
    for name, source in stand_ins(page).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (base.folder / source).is_dir() else shutil.copyfile
        if not (tmp_path / name).exists():
            copy(base.folder / source, tmp_path / name)
        if (base.folder / f"{source}.checkpoints").is_dir():
            shutil.copytree(base.folder / f"{source}.checkpoints", tmp_path / f"{name}.checkpoints", dirs_exist_ok=True)
    for name, text in re.findall(SAVED, page.read_text(encoding="utf-8"), re.DOTALL):
        (tmp_path / name).write_text(text)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "bin").symlink_to(base.folder / "bin")
    (tmp_path / "page.sh").write_text(script(page, free_port()))
    output = tmp_path / "output"
    with (
        output.open("wb") as file,
        subprocess.Popen(
            ["bash", "page.sh"], cwd=tmp_path, env=base.environment, stdout=file, stderr=file, start_new_session=True
        ) as shell,
    ):
        try:
            status = shell.wait(LIMIT)
        except subprocess.TimeoutExpired:
            status = -1
        finally:
            os.killpg(shell.pid, signal.SIGTERM) if shell.poll() is None else None
    shown = output.read_text(errors="replace")
    print(shown)
    assert status == 0, f"{name_of(page)}: status {status} of the last command\n{shown[-3000:]}"


def test_the_site_builds(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "NO_MKDOCS_2_WARNING": "1"}
    run_program([*PYTHON, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path / "site")], environment=environment)
