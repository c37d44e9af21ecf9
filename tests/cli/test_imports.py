"""Help and mistakes are answered without importing what takes seconds; programs get the models with the package."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import multilin

HEAVY = {"torch", "transformers", "numba", "matplotlib", "datasets", "pandas", "accelerate", "scipy", "numpy"}

SOURCE = Path(multilin.__file__).parent

LIGHT_CALLS = """
import sys
sys.argv = ["/usr/bin/multilin"]
from multilin.cli.main import VERBS, main
assert main(["--help"]) == main(["--version"]) == 0
for verb in VERBS:
    assert main([*verb.split(), "--help"]) == 0, verb
for mistake in (
    "trian", "tokenizer", "generate", "train demoo", "train --model.hiden_size 8", "train --model.hidden_size big",
    "train --training.max_steps 0", "train nowhere.yaml", "demo --training.batch_size 0", "compare nowhere.yaml",
    "compare --tokens 0", "generate nowhere", "generate . --prompt-file nowhere", "evaluate . --output no/where/x",
    "evaluate . --task-limit 3", "explain nowhere", "quantize nowhere", "rollout nowhere",
    "info --num-layers 3", "doctor now",
):
    assert main(mistake.split()) == 2, mistake
print(*sorted({name.partition(".")[0] for name in sys.modules}), file=sys.stderr)
"""


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=os.environ | environment, check=False
    )


def test_help_and_mistakes_import_nothing_heavy(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    done = subprocess.run(
        [sys.executable, "-c", LIGHT_CALLS], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    assert HEAVY.isdisjoint(done.stderr.splitlines()[-1].split())


def test_the_module_is_the_command_line() -> None:
    done = run("-X", "importtime", "-m", "multilin", "--help")
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "usage: multilin VERB" in done.stdout
    assert "multilin" in imported
    assert HEAVY.isdisjoint(imported)


@pytest.mark.parametrize(
    ("arguments", "original", "expected"),
    [
        (["/venv/bin/multilin", "train"], [], True),
        (["C:\\Scripts\\multilin.exe", "train"], [], sys.platform == "win32"),
        (["-m", "train"], ["python", "-m", "multilin", "train"], True),
        (["-m"], ["python", "-X", "importtime", "-mmultilin"], True),
        (["-m", "-m", "multilin"], ["python", "-m", "pytest", "-m", "multilin"], False),
        (["-m", "run"], ["python", "-m", "multilin.analysis.evaluate.tasks", "run"], False),
        (["/home/me/multilin.py"], ["python", "/home/me/multilin.py"], False),
        (["/home/me/multilin/train.py"], ["python", "train.py"], False),
        (["-c"], ["python", "-c", "import multilin"], False),
        (["/lib/ipykernel_launcher.py", "-f", "x"], [], False),
        ([""], ["python"], False),
        ([], [], False),
    ],
)
def test_programs_are_told_from_the_command_line(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], original: list[str], expected: bool
) -> None:
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(sys, "orig_argv", original)
    assert multilin._is_command_line() is expected


def test_the_command_line_alone_prints() -> None:
    """All else reports to the progress it is given, and imports nothing of the command line."""
    for path in SOURCE.rglob("*.py"):
        if path.is_relative_to(SOURCE / "cli") or path == SOURCE / "__main__.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [name.name for name in node.names] if isinstance(node, ast.Import) else []
            modules = [name for name in modules if name != "rich.filesize"]  # which makes texts of numbers alone
            assert not any(name.startswith(("rich", "multilin.cli")) for name in modules), path
            assert not (isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "sys.stdout.write")), path


LOAD = """
import multilin
from transformers import AutoModelForCausalLM
print(isinstance(AutoModelForCausalLM.from_pretrained({folder!r}), multilin.MultilinForCausalLM))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["-c", "a program", "a program of this name", "executed text"])
def test_a_program_that_imports_multilin_loads_its_models(additive: Path, tmp_path: Path, kind: str) -> None:
    code = LOAD.format(folder=str(additive))
    if kind == "executed text":
        code = f"exec({code!r}, {{'__name__': '__main__'}})"
    if kind.startswith("a program"):
        program = tmp_path / ("multilin.py" if kind.endswith("name") else "program.py")
        program.write_text(code)
        # A program's own folder comes first where modules are looked for, and there its name is taken.
        done = run(str(program), PYTHONSAFEPATH="1")
    else:
        done = run("-c", code)
    assert done.stdout.strip() == "True", done.stderr
