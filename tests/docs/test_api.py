"""The API pages: they list what users import, with a first sentence that says what it does."""

import dataclasses
from collections.abc import Collection
from pathlib import Path

import pytest

import multilin
from multilin import layers
from multilin.ops.dispatch import all_ops
from multilin.training.recipe import Recipe
from tests.docs.generator import generate

DOCS = Path(__file__).parents[2] / "docs"
LISTED = {page.stem: generate.API_ROW.findall(page.read_text()) for page in (DOCS / "api").glob("*.md")}
FEWEST_WORDS = 5


@pytest.mark.parametrize(
    ("page", "names"), [("model", multilin.__all__), ("layers", layers.__all__), ("ops", all_ops())]
)
def test_a_page_lists_every_public_name(page: str, names: Collection[str]) -> None:
    assert set(names) <= {part for path in LISTED[page] for part in path.split(".")}


@pytest.mark.parametrize("path", sorted(path for paths in LISTED.values() for path in paths))
def test_a_listed_name_exists_and_its_docstring_begins_with_a_sentence(path: str) -> None:
    sentence = generate.first_sentence(path)
    assert sentence[0].isupper()
    assert sentence.endswith(".")
    assert "\n" not in sentence
    assert len(sentence.split()) >= FEWEST_WORDS
    assert not sentence.startswith(("See ", "What "))


def test_the_page_of_recipes_has_a_table_for_every_section() -> None:
    text = (DOCS / "recipes.md").read_text(encoding="utf-8")
    for section in dataclasses.fields(Recipe):
        if dataclasses.is_dataclass(section.type):
            assert f"## {section.name}\n" in text
            assert f"<!-- table: {section.name} -->" in text
