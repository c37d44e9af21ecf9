"""The files in docs/deploy.md: they parse, and what they give to the server exists."""

import dataclasses
import json
import re
import shlex
from pathlib import Path

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


def test_the_command_of_ray() -> None:
    (command,) = re.findall(r"serve run multilin.serving.ray_app:app (.*)$", TEXT, re.MULTILINE)
    values = dict(word.split("=", 1) for word in command.split())
    own = {name: value for name, value in values.items() if name in NAMES[RayArguments]}
    load_settings(RayArguments, own)
    load_settings(ServeLimits, {name: value for name, value in values.items() if name not in own})
