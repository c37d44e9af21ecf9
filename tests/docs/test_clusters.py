"""The files in docs/clusters.md parse, their flags exist, and the arithmetic of its tables is that of the code."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from multilin.analysis.plan import DEVICES, sent_bytes
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


def test_volumes_of_the_job_are_those_that_it_mounts() -> None:
    job, claim = documents()
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    pod = worker["template"]["spec"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == volumes.keys()
    assert volumes["runs"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert job["spec"]["elasticPolicy"]["maxReplicas"] == worker["replicas"]
    assert str(pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]) == job["spec"]["nprocPerNode"]
    assert pod["containers"][0]["name"] == "pytorch", "the operator looks for this name"


def rows(heading: str) -> list[list[str]]:
    table = TEXT[TEXT.index(heading) :].split("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_the_bytes_are_those_of_the_plan() -> None:
    ways = [("ddp", 1.0), ("int8", 1.0), ("fsdp", 1.0), ("fsdp", 0.5)]
    for (_, _, shown), (way, gathered) in zip(rows("| | bytes | N = 8"), ways, strict=True):
        sent = sent_bytes(way, 4 * 10**9, 0, 8, gathered=gathered)
        assert shown == f"{sent / 1e9:.1f} GB"


def test_the_tokens_that_hide_sending_follow_from_the_bytes() -> None:
    peaks = {f"{device.half / 1e12:.0f}e12" for device in DEVICES.values()}
    parameters, many = 10**9, 10**12
    for _, peak, link, *shown in rows("| e = 0.4 | F | L"):
        assert peak in peaks
        for cell, way, share in zip(shown, ("ddp", "int8", "fsdp"), (4, 4, 6), strict=True):
            seconds = sent_bytes(way, 4 * parameters, 0, many, gathered=0.5) / float(link)
            tokens = seconds * 0.4 * float(peak) / (share * parameters)
            assert int(cell.replace(",", "")) == pytest.approx(tokens, rel=2e-3)
