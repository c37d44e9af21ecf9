"""The files in docs/deploy.md: they parse, and what they give to the server exists."""

import dataclasses
import json
import re
import shlex
from pathlib import Path

import yaml

from multilin.cli.serve import ServeArguments
from multilin.serving.ray_app import RayArguments
from multilin.serving.settings import ServeLimits
from multilin.settings import load_settings

TEXT = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text(encoding="utf-8")
NAMES = {settings: {field.name for field in dataclasses.fields(settings)}
         for settings in (ServeArguments, ServeLimits, RayArguments)}  # fmt: skip


def blocks(kind: str) -> list[str]:
    found = re.findall(rf"^```{kind}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    assert found
    return found


def check(words: list[str]) -> None:
    """The words of a command after `serve` are a run, and flags with values that they take."""
    run, *rest = words
    values = {
        name.removeprefix("--").replace("-", "_"): value for name, value in zip(rest[::2], rest[1::2], strict=True)
    }
    limits = {name: value for name, value in values.items() if name in NAMES[ServeLimits]}
    load_settings(ServeLimits, limits)
    load_settings(ServeArguments, {"run": run} | {name: values[name] for name in values if name not in limits})


def test_the_unit_of_systemd() -> None:
    (unit,) = blocks("ini")
    (command,) = re.findall(r"^ExecStart=\S+/multilin serve (.*)$", unit, re.MULTILINE)
    check(shlex.split(command))
    assert "EnvironmentFile=" in unit


def test_the_container() -> None:
    (container,) = blocks("dockerfile")
    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", container, re.MULTILINE)
    assert json.loads(entry)[:2] == ["multilin", "serve"]
    check(json.loads(entry)[2:])


def test_the_manifests_of_kubernetes() -> None:
    secret, claim, deployment, service = yaml.safe_load_all(blocks("yaml")[0])
    template = deployment["spec"]["template"]
    (container,) = template["spec"]["containers"]
    check([*container["command"][2:], *container["args"]])
    assert all(isinstance(word, str) for word in container["args"])
    assert set(secret["stringData"]) == {"MULTILIN_API_KEY"}
    assert (
        service["spec"]["selector"] == template["metadata"]["labels"] == deployment["spec"]["selector"]["matchLabels"]
    )
    assert service["spec"]["ports"][0]["targetPort"] == container["ports"][0]["containerPort"]
    (volume,), (mount,) = template["spec"]["volumes"], container["volumeMounts"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert mount["mountPath"] in container["args"]


def test_the_configuration_of_ray() -> None:
    (application,) = yaml.safe_load(blocks("yaml")[1])["applications"]
    assert application["import_path"] == "multilin.serving.ray_app:app"
    (command,) = re.findall(r"serve run multilin.serving.ray_app:app (.*)$", TEXT, re.MULTILINE)
    for values in (application["args"], dict(word.split("=", 1) for word in command.split())):
        own = {name: value for name, value in values.items() if name in NAMES[RayArguments]}
        load_settings(RayArguments, own)
        load_settings(ServeLimits, {name: value for name, value in values.items() if name not in own})
