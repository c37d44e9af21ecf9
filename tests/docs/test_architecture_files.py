"""Architectures stay short and say what they are: one file each, and what needs more belongs into layers or ops."""

from pathlib import Path

import pytest

from multilin.architectures import base
from multilin.architectures.base import architectures
from multilin.settings import field_help
from tests.docs.generator import generate

FILES = sorted(path for path in Path(base.__file__).parent.glob("*.py") if path.stem in architectures())
MOST_LINES = 190


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_architecture_fits_on_a_few_screens(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MOST_LINES


@pytest.mark.parametrize("name", architectures())
def test_pages_have_their_sections(name: str) -> None:
    page = generate.architecture_page(architectures()[name])
    assert "## State\n\nMeasured" not in page, "the docstring of the file has no paragraph that starts with `State:`"
    sections = ["State", "Limits", "When to use it", "Options of a model", "Options of a layer", "Source"]
    assert [line[3:] for line in page.splitlines() if line.startswith("## ")] == sections


@pytest.mark.parametrize("name", architectures())
def test_options_have_comments(name: str) -> None:
    for options in (architectures()[name].options, architectures()[name].preset_options):
        assert all(field_help(options).values()), f"a field of {options.__name__} has no comment, which is its help"
