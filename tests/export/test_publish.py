"""The model's code in one folder: the same numbers as the package, and nothing of the package needed."""

import ast
import dataclasses
import importlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from multilin.architectures import architectures, base, get_architecture
from multilin.errors import InputError
from multilin.export.publish import builtin_architectures, model_files, publish_run
from multilin.model.config import AUTO_FILE
from multilin.model.factory import create_model
from multilin.runs.load import Run


def published(names: Iterable[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module that config.json names, from files in a package of their own."""
    folder.mkdir()
    for file, text in model_files(names).items():
        (folder / file).write_text(text)
    monkeypatch.syspath_prepend(folder.parent)
    return importlib.import_module(f"{folder.name}.{Path(AUTO_FILE).stem}")


def test_architectures_of_other_packages_are_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = create_model("elita", hidden_size=16, num_layers=1, vocab_size=32, n_positions=16)
    mine = dataclasses.replace(get_architecture("elita"), name="mine", layer=type("Mine", (), {"__module__": "mine"}))
    monkeypatch.setitem(base._registry, "mine", mine)
    assert "mine" in architectures()
    assert "mine" not in builtin_architectures()
    model.config.layers[0]["architecture"] = "mine"
    with pytest.raises(InputError, match="a model of mine given, an architecture of another package"):
        publish_run(
            Run(tmp_path, model, PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE()))), "me/mine", tmp_path
        )


def test_the_files_import_nothing_but_pytorch_and_transformers() -> None:
    files = model_files(builtin_architectures())
    imported = {name for text in files.values() for name in imports(ast.parse(text))}
    relative = {name.removeprefix(".") for name in imported if name.startswith(".")}
    assert {f"{name}.py" for name in relative} == {*files} - {AUTO_FILE}
    assert {name for name in imported if name[0] != "."} - set(sys.stdlib_module_names) == {"torch", "transformers"}


def imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            yield from ([f".{node.module}"] if node.module else [f".{alias.name}" for alias in node.names])
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").split(".")[0]
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)


def test_a_folder_has_the_architectures_of_its_model_alone() -> None:
    files = model_files(["elita"])
    assert "architectures_elita.py" in files
    assert "architectures_tscale.py" not in files


@pytest.mark.parametrize("name", architectures())
def test_logits_and_states_are_those_of_the_package(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flat = published([name], tmp_path / f"published_{name}", monkeypatch)
    torch.manual_seed(0)
    match = {"window": 20, "longest": 4} if name == "mingru" else None
    ours = create_model(name, hidden_size=32, num_layers=2, vocab_size=60, n_positions=48, match=match).eval()
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


def test_gradients_are_those_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flat = published(["tscale"], tmp_path / "published_gradients", monkeypatch)
    torch.manual_seed(0)
    ours = create_model("tscale", hidden_size=32, num_layers=2, vocab_size=60, n_positions=48)
    theirs = flat.MultilinForCausalLM(flat.MultilinConfig(**ours.config.to_dict()))
    theirs.load_state_dict(ours.state_dict())
    ids = torch.randint(60, (2, 40))
    for model in (ours, theirs):
        model(ids, labels=ids).loss.backward()
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(other.grad, mine.grad, rtol=1e-3, atol=1e-5, msg=lambda text, name=name: name + text)
