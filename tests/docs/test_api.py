"""The API pages: they have what users import, and say of its attributes what docstrings and comments say."""

import importlib
import re
from collections.abc import Collection
from pathlib import Path

import griffe
import pytest

import multilin
from multilin import layers
from multilin.ops.dispatch import all_ops
from multilin.settings import field_help
from multilin.training.settings import TrainingRecipe
from tests.docs.generator import docstrings

API = Path(__file__).parents[2] / "docs" / "api"
SHOWN = {page.stem: re.findall(r"^::: (.+)$", page.read_text(), re.MULTILINE) for page in API.glob("*.md")}


@pytest.mark.parametrize(
    ("page", "names"), [("model", multilin.__all__), ("layers", layers.__all__), ("ops", all_ops())]
)
def test_a_page_has_every_public_name(page: str, names: Collection[str]) -> None:
    assert set(names) <= {part for path in SHOWN[page] for part in path.split(".")}


@pytest.mark.parametrize("path", sorted(path for paths in SHOWN.values() for path in paths))
def test_what_is_shown_exists(path: str) -> None:
    module, _, name = path.rpartition(".")
    assert getattr(importlib.import_module(module), name).__doc__


def test_paragraphs_about_attributes_are_lists() -> None:
    text = "Rows.\n\nOf text: a, b.\n\nfirst, second: numbers,\n    of rows.\nlast: another.\n\nEnd."
    lines = ["Attributes:", "    first, second: numbers,", "        of rows.", "    last: another."]
    assert docstrings.with_sections(text) == "\n".join(["Rows.\n\nOf text: a, b.\n", *lines, "\nEnd."])


def test_fields_of_settings_have_their_comments() -> None:
    package = griffe.load(
        TrainingRecipe.__module__, search_paths=["src"], extensions=griffe.load_extensions(docstrings.Attributes)
    )
    (section,) = [
        section
        for section in package[TrainingRecipe.__name__].docstring.parse("google")
        if section.kind is griffe.DocstringSectionKind.attributes
    ]
    assert {entry.name: entry.description for entry in section.value} == {
        name: f"{text}." for name, text in field_help(TrainingRecipe).items()
    }
