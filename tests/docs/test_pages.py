"""The pages tell the truth: the generated ones are fresh, links lead somewhere, and what commands name exists."""

import itertools
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from multilin.analysis.compare.sweep import Sweep, find_sweep
from multilin.cli.arguments import flags
from multilin.cli.compare import CompareArguments
from multilin.cli.main import VERBS
from multilin.cli.parser import parse
from multilin.errors import InputError
from multilin.settings import load_settings
from multilin.training.recipe import Recipe, builtin_recipes, load_recipe
from tests.docs.generator import generate
from tests.docs.pages import (
    FENCED,
    PAGES,
    ROOT,
    anchors,
    bash_reads,
    blocks,
    commands,
    multilin_call,
    name_of,
    prose,
    simple_commands,
)

MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
BENCHMARKS = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "benchmarks").glob("*.py")).replace("-", "_")

on_every_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


def test_generated_pages_follow_the_code() -> None:
    for path, text in generate.pages().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is stale: run python docs/generate.py"


@on_every_page
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)|(?:href|src)=\"([^\"]+)\"", prose(page))
    for target in ("".join(link) for link in links):
        if re.match(r"\w+:", target):
            continue
        file, _, anchor = target.partition("#")
        path = page.parent / file if file else page
        assert path.exists(), f"{name_of(page)} links to {target}"
        if anchor and path.suffix == ".md":
            assert anchor in anchors(path), f"{name_of(page)} links to {target}; there are {sorted(anchors(path))}"


@on_every_page
def test_blocks_can_be_read(page: Path) -> None:
    for language, text in blocks(page):
        if language == "bash":
            assert not bash_reads(text)
        elif language == "python":
            compile(text, name_of(page), "exec")
        elif language == "json":
            for document in [text] if text.startswith("{\n") else text.splitlines():
                json.loads(document)
        elif language in ("yaml", "yml"):
            for document in yaml.safe_load_all(text):
                check_document(document)


@on_every_page
def test_commands_name_what_exists(page: Path) -> None:
    for block in blocks(page):
        found = commands(block.text) if block.language == "bash" else []
        for words in itertools.chain.from_iterable(map(simple_commands, found)):
            try:
                check(words)
            except (AssertionError, InputError) as error:
                error.add_note(" ".join(words))
                raise


@on_every_page
def test_commands_in_sentences_name_what_exists(page: Path) -> None:
    for code in re.findall(r"`(multilin [a-z][^`\n]*)`", FENCED.sub("", page.read_text(encoding="utf-8"))):
        if call := multilin_call(code.split()):
            known = {flag.text for flag in flags(VERBS[call[0]])}
            given = [word.split("=")[0].replace("--no-", "--") for word in call[1] if word.startswith("--")]
            assert all(any(f"{name}.".startswith(f"{flag}.") for flag in known) for name in given), code


def check(words: list[str]) -> None:
    """Every name in a command is one that the program it starts knows."""
    if call := multilin_call(words):
        check_call(*call)
    elif words[0] == "make":
        for target in words[1:]:
            assert "=" in target or re.search(rf"^{target}:", MAKEFILE, re.MULTILINE), target
    elif "benchmarks" in words and words[words.index("benchmarks") - 1] == "-m":
        for word in words[words.index("benchmarks") + 1 :]:
            name = word.split("=")[0].lstrip("-").replace("-", "_")
            assert not word.startswith("--") or re.search(rf"\b{name}\b", BENCHMARKS), word
    elif "install" in words:
        for name in re.findall(r"\[([\w,]+)\]", " ".join(words)):
            assert set(name.split(",")) <= set(EXTRAS), name


def check_call(verb: str, words: list[str]) -> None:
    """The words after a verb of multilin: flags, the types of their values, and built-in recipes."""
    if "--help" in words:
        return
    first, *_, changes = [*parse(verb, VERBS[verb], words), {}]
    if isinstance(first, CompareArguments):
        rows = [row for row in first.rows if row in builtin_recipes() or not is_path(row) or (ROOT / row).exists()]
        if rows == first.rows:
            find_sweep(rows, first.task)
    elif hasattr(first, "recipe"):
        assert first.recipe is None or is_path(first.recipe) or first.recipe in builtin_recipes(), first.recipe
        if (first.recipe is None or not is_path(first.recipe)) and "model.start" not in changes:
            load_recipe(first.recipe, changes)


def is_path(name: str) -> bool:
    """Whether a recipe or row is a file, which need not be there; a variable of the shell is one too."""
    return any(character in name for character in "./$")


def check_document(document: Any) -> None:
    """A YAML document whose sections are those of a recipe or sweep has fields that multilin knows."""
    names = set(document) if isinstance(document, dict) else set()
    for settings in (Recipe, Sweep):
        if names and names <= set(settings.__dataclass_fields__):
            load_settings(settings, document)
