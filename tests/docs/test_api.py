"""The API pages: they have what users import, and say of its attributes what docstrings and comments say."""

import importlib
import re
from collections.abc import Collection
from pathlib import Path

import pytest

import multilin
from multilin import layers
from multilin.ops.dispatch import all_ops

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
