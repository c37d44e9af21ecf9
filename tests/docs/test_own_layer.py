"""The examples of README and docs/own-layer.md run; the complete architecture keeps the contract."""

import dataclasses
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from multilin import MultilinConfig, MultilinForCausalLM
from multilin.architectures import base
from multilin.architectures.base import Architecture, LayerOptions, Preset, architectures, get_architecture, register
from multilin.errors import InputError
from multilin.settings import field_help
from tests.contract.conftest import make_model, packs  # noqa: F401
from tests.contract.test_documents import (  # noqa: F401
    test_documents_are_separate_also_across_calls,
    test_documents_do_not_see_each_other,
)
from tests.contract.test_reading import (  # noqa: F401
    op_calls,
    test_packed_texts_do_not_read_each_other,
    test_padding_is_not_read_and_changes_no_weight,
    test_shares_sum_to_one_where_anything_is_read,
    test_weights_applied_to_the_values_are_what_was_read,
)
from tests.contract.test_streaming import (  # noqa: F401
    test_extreme_tokens_stay_finite,
    test_layers_keep_the_laws,
    test_left_padding_is_inert,
    test_the_state_does_not_grow,
    test_token_by_token_is_reading_at_once,
)
from tests.contract.test_training import (  # noqa: F401
    test_64_tokens_are_learned_by_heart,
    test_gradient_checkpointing_changes_nothing,
)
from tests.docs.generator import generate

ROOT = Path(__file__).parents[2]
PROGRAMS = [
    program
    for page in (ROOT / "README.md", ROOT / "docs" / "own-layer.md")
    for program in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
]
README, OWN, CHECK, NAME = "README", "ema", "check", "gated_mean"
FILES = dict(zip((README, OWN, CHECK, NAME), PROGRAMS, strict=True))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Architecture]:
    """The architecture of the page's file, as saved under its name."""
    path = tmp_path_factory.mktemp("architectures") / f"{NAME}.py"
    path.write_text(FILES[NAME])
    spec = importlib.util.spec_from_file_location(NAME, path)
    module = sys.modules[NAME] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module.architecture
    del sys.modules[NAME]


@pytest.fixture(autouse=True)
def example(written: Architecture, monkeypatch: pytest.MonkeyPatch) -> Architecture:
    monkeypatch.setattr(base, "_registry", dict(base._registry))
    register(written)
    return written


@pytest.fixture(params=["default", "one head"])
def case(request: pytest.FixtureRequest, example: Architecture) -> dict:
    return {"architecture": NAME, "options": dict({"default": {}, **example.variants}[request.param])}


def test_readme_and_page_have_the_same_file() -> None:
    assert FILES[README] == FILES[OWN]


def test_the_module_of_the_page_runs_from_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "ema.py").write_text(FILES[OWN])
    config = MultilinConfig.from_architecture(str(tmp_path / "ema.py"), hidden_size=8, num_layers=2, vocab_size=9)
    model, ids = MultilinForCausalLM(config).eval(), torch.arange(8)[None]
    state = model(ids[:, :5]).past_key_values
    onward = model(ids[:, 5:], past_key_values=state).logits
    torch.testing.assert_close(onward, model(ids).logits[:, 5:])


@pytest.mark.slow
def test_the_test_of_the_page_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    Path("ema.py").write_text(FILES[OWN])
    names: dict[str, Any] = {}
    exec(FILES[CHECK], names)
    names["test_ema"]()


def test_its_page_says_what_the_file_says(example: Architecture) -> None:
    page = generate.architecture_page(example)
    assert page.startswith("# Gated mean\n\nGated mean: each head averages")
    assert all(f"| `{name}` |" in page and text in page for name, text in field_help(example.options).items())
    assert f"[Gated mean]({NAME}.md)" in generate.architecture_table()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"options": type("Plain", (LayerOptions,), {})}, "Plain of 'gated_mean' needs the decorator @settings"),
        ({"preset": lambda sizes, choices: Preset([choices] * 2, {"n_position": 8})}, "did you mean 'n_positions'"),
        (
            {"layer": lambda width, options: nn.Conv1d(width, width, 1)},
            "Conv1d of 'gated_mean' has parameters, but the model initialises only those of",
        ),
    ],
)
def test_mistakes_in_a_file_are_named(
    example: Architecture, monkeypatch: pytest.MonkeyPatch, changes: dict, words: str
) -> None:
    def build() -> None:
        monkeypatch.setitem(base._registry, NAME, dataclasses.replace(example, **changes))
        MultilinForCausalLM(MultilinConfig.from_architecture(NAME, hidden_size=8, num_layers=2, vocab_size=9))

    with pytest.raises(InputError, match=words):
        build()


def test_a_name_stands_for_one_architecture(example: Architecture) -> None:
    register(example)
    with pytest.raises(InputError, match="'gated_mean' is the name of two architectures"):
        register(Architecture(**{**vars(get_architecture("elita")), "name": NAME}))


def test_an_installed_package_is_found_by_its_entry_point(
    example: Architecture, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = "multilin.architectures"
    entry = importlib.metadata.EntryPoint("other", f"{NAME}:architecture", group)
    monkeypatch.delitem(base._registry, NAME)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [entry])
    assert get_architecture(NAME) is example


@pytest.mark.parametrize("value", ["no_such_module:architecture", "math:no_such_name", "math:pi"])
def test_a_package_whose_architecture_cannot_be_loaded_is_named(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = importlib.metadata.EntryPoint("other", value, "multilin.architectures")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [entry])
    monkeypatch.setattr(base, "_left_out", set())
    assert get_architecture("elita").name == "elita"
    with pytest.warns(UserWarning, match=f"^architecture: the entry point other = {value} cannot be loaded"):
        assert "elita" in architectures()
    with pytest.raises(InputError, match="'elitta' is not known; did you mean 'elita'"):
        get_architecture("elitta")  # and nothing is said a second time
