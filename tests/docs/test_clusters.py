"""The files in docs/clusters.md parse, and their flags exist."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from multilin.cli.arguments import flags
from multilin.cli.main import VERBS

TEXT = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text(encoding="utf-8")
BASH = re.findall(r"^```bash\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("script", BASH)
def test_the_shell_reads_the_commands(script: str, tmp_path: Path) -> None:
    (tmp_path / "script.sh").write_text(script)
    subprocess.run(["bash", "-n", str(tmp_path / "script.sh")], check=True)


def test_every_flag_of_multilin_exists() -> None:
    (kubernetes,) = (document for document in documents() if document["kind"] == "PyTorchJob")
    container = kubernetes["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    lines = "\n".join(BASH).replace("\\\n", " ").splitlines()
    found = [shlex.split(line) for line in [*lines, shlex.join([*container["command"], *container["args"]])]]
    commands = [words[words.index("multilin") + 1 :] for words in found if "multilin" in words]
    assert len(commands) >= 5
    for verb, *words in commands:
        known = {flag.text for flag in flags(VERBS[verb])}
        assert {word for word in words if word.startswith("--")} <= known, words


def documents() -> list[dict]:  # type: ignore[type-arg]
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    return list(yaml.safe_load_all(text))
