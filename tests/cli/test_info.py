import json
from collections.abc import Callable
from pathlib import Path

import pytest

from multilin.architectures import architectures
from multilin.model.factory import create_model

Call = Callable[..., str]
SIZES = ["--hidden-size", 32, "--num-layers", 3, "--vocab-size", 50, "--n-positions", 40]


def test_info_counts_gpt2_as_by_hand(cli: Call) -> None:
    found = json.loads(cli("info", "gpt2", "--json", *SIZES))
    d, vocabulary, positions = 32, 50, 40
    layer = 12 * d * d + 13 * d
    assert found["parameters"] == vocabulary * d + positions * d + 3 * layer + 2 * d
    assert found["embedding_parameters"] == vocabulary * d + positions * d
    assert [part["parameters"] for part in found["layers"]] == [layer] * 3
    # Per token read: a key and a value in float32 in every layer, and two products with them.
    assert found["state_growth"] == 3 * 2 * d * 4
    assert found["flops_growth"] == 3 * 2 * 2 * d
    assert found["flops_per_token"] == 2 * (3 * 12 * d * d + vocabulary * d) + 2 * found["flops_growth"]


@pytest.mark.parametrize("architecture", architectures())
def test_info_describes_every_architecture(cli: Call, architecture: str) -> None:
    found = json.loads(cli("info", architecture, "--json", *SIZES))
    model = create_model(architecture, hidden_size=32, num_layers=3, vocab_size=50, n_positions=40)
    assert found["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert found["state_growth"] == 0
    assert found["longest_text"] == model.config.n_positions
    assert sum(layer["state_bytes"] for layer in found["layers"]) <= found["state_bytes"]
    assert [layer["architecture"] for layer in found["layers"]] == [architecture] * len(model.config.layers)
    shown = cli("info", architecture, *SIZES)
    assert f"{found['parameters']:,}" in shown
    assert architectures()[architecture].source.split()[0] in shown


def test_info_without_a_name_lists_the_architectures(cli: Call, refusal: Call) -> None:
    listed = json.loads(cli("info", "--json"))
    shown = cli("info")
    assert list(listed) == list(architectures())
    assert all(name in shown and one["title"].split()[0] in shown for name, one in listed.items())
    assert "give the name of an architecture" in refusal("info", *SIZES)


def test_info_takes_options(cli: Call, refusal: Call) -> None:
    found = json.loads(cli("info", "additive", "--json", *SIZES, "--options", '{"windows": 5}'))
    assert [layer["options"]["window"] for layer in found["layers"]] == [5, 5, 5]
    assert "did you mean 'windows'?" in refusal("info", "additive", *SIZES, "--options", '{"window": 5}')


def test_info_of_a_run(additive: Path, cli: Call, refusal: Call) -> None:
    assert json.loads(cli("info", additive, "--json"))["longest_text"] == 64
    assert "leave out the flags for sizes" in refusal("info", additive, "--num-layers", 3)
    assert (
        refusal("info", "aditive")
        == "MODEL: 'aditive' is neither a folder nor an architecture; did you mean 'additive'?"
    )
