"""Settings: help from comments, and messages a user can act on."""

from typing import Literal

import pytest

from multilin.data.settings import DataRecipe
from multilin.errors import InputError
from multilin.settings import field_help, load_settings, settings


@settings
class Inner:
    width: int = 4  # tokens read
    name: str | None = None  # the name, if any
    kind: Literal["near", "far"] = "near"  # which


@settings
class Outer:
    inner: Inner = Inner()  # the section
    rate: float = 0.5  # how fast


def test_comments_are_the_help() -> None:
    assert field_help(Inner) == {"width": "tokens read", "name": "the name, if any", "kind": "which"}


def test_a_path_may_begin_in_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    loaded = load_settings(DataRecipe, {"source": "~/books", "validation": "a~/b"})
    assert (loaded.source, loaded.validation) == ("/home/me/books", "a~/b")


def test_values_are_read_and_converted() -> None:
    loaded = load_settings(Outer, {"inner": {"width": 8, "name": "a"}, "rate": "5e-4"})
    assert loaded == Outer(Inner(8, "a"), 5e-4)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"inner": {"widht": 3}}, ["inner.widht", "'width'"]),
        ({"nothing": 3}, ["nothing", "inner, rate"]),
        ({"inner": {"width": "x"}}, ["inner.width", "'x'", "integer"]),
        ({"inner": {"width": 1.5}}, ["inner.width", "1.5", "integer"]),
        ({"inner": {"name": 3}}, ["inner.name", "3", "string"]),
        ({"inner": {"kind": "middle"}}, ["inner.kind", "'middle'", "'near' or 'far'"]),
        ({"inner": 3}, ["inner", "3", "dictionary"]),
    ],
)
def test_a_mistake_is_named_in_one_sentence(values: dict, words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        load_settings(Outer, values)
    assert all(word in str(caught.value) for word in words)
    assert "\n" not in str(caught.value)
