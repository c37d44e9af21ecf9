"""The model's code in one file: the same numbers as the package, and nothing of the package needed."""

import ast
import dataclasses
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from multilin.architectures import architectures, base, get_architecture
from multilin.errors import InputError
from multilin.inference.runs import Run
from multilin.model.factory import create_model
from multilin.model.remote import AUTO_FILE
from multilin.publish.flat import flat_model, own_architectures
from multilin.publish.folder import publish_run


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    path = tmp_path_factory.mktemp("flat") / AUTO_FILE
    path.write_text(flat_model())
    spec = importlib.util.spec_from_file_location("flat_model_of_a_test", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_architectures_of_other_packages_are_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = create_model("elita", hidden_size=16, num_layers=1, vocab_size=32, n_positions=16)
    mine = dataclasses.replace(get_architecture("elita"), name="mine", layer=type("Mine", (), {"__module__": "mine"}))
    monkeypatch.setitem(base._registry, "mine", mine)
    assert "mine" in architectures()
    assert "mine" not in own_architectures()
    flat_model()
    model.config.layers[0]["architecture"] = "mine"
    with pytest.raises(InputError, match="a model of mine given, an architecture of another package"):
        publish_run(
            Run(tmp_path, model, PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE()))), "me/mine", tmp_path
        )


def test_the_file_imports_nothing_but_pytorch_and_transformers() -> None:
    imported = set()
    for node in ast.walk(ast.parse(flat_model())):
        if isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
        elif isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
    assert imported - set(sys.stdlib_module_names) == {"torch", "transformers"}


@pytest.mark.parametrize("name", architectures())
def test_logits_and_states_are_those_of_the_package(flat: ModuleType, name: str) -> None:
    torch.manual_seed(0)
    ours = create_model(name, hidden_size=32, num_layers=2, vocab_size=60, n_positions=48).eval()
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    theirs = flat.MultilinForCausalLM(flat.MultilinConfig(**ours.config.to_dict())).eval()
    theirs.load_state_dict(ours.state_dict())
    ids = torch.randint(60, (2, 40))
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, ours(ids).logits, rtol=1e-4, atol=1e-4)
        first = theirs(ids[:, :25], use_cache=True)
        rest = theirs(ids[:, 25:], past_key_values=first.past_key_values)
        torch.testing.assert_close(rest.logits, ours(ids).logits[:, 25:], rtol=1e-4, atol=1e-4)


def test_gradients_are_those_of_the_package(flat: ModuleType) -> None:
    torch.manual_seed(0)
    ours = create_model("tscale", hidden_size=32, num_layers=2, vocab_size=60, n_positions=48)
    theirs = flat.MultilinForCausalLM(flat.MultilinConfig(**ours.config.to_dict()))
    theirs.load_state_dict(ours.state_dict())
    ids = torch.randint(60, (2, 40))
    for model in (ours, theirs):
        model(ids, labels=ids).loss.backward()
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(other.grad, mine.grad, rtol=1e-3, atol=1e-5, msg=lambda text, name=name: name + text)
