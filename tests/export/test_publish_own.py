"""Published models with layers from users' files: their code goes along, and loads without multilin."""

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from multilin import InputError, MultilinConfig, MultilinForCausalLM, trust_code
from multilin.architectures import own_file
from multilin.export.publish import publish_run
from multilin.runs.load import Run
from tests.architectures.test_own_file import LAYERS, NAMES, draw, make

GUIDE = Path(__file__).parents[2] / "docs" / "own-layer.md"
ARCHITECTURE = next(code for code in re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.S) if "@settings" in code)
pytestmark = pytest.mark.filterwarnings("ignore:layer Attention has no state")


@pytest.fixture(autouse=True)
def config_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "layers.py"  # the name of a module of multilin
    path.write_text(LAYERS)
    return path


def publish(model: MultilinForCausalLM, folder: Path) -> str:
    """Publish a model; return the text of its card."""
    publish_run(Run(folder, model, PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE()))), "me/mine", folder)
    return (folder / "README.md").read_text()


def loaded_alone(model: MultilinForCausalLM, folder: Path, monkeypatch: pytest.MonkeyPatch) -> MultilinForCausalLM:
    """The same model, built by the files of a published folder."""
    monkeypatch.syspath_prepend(folder.parent)
    flat: ModuleType = importlib.import_module(f"{folder.name}.modeling_multilin")
    other = flat.MultilinForCausalLM.from_pretrained(folder)
    assert not type(other).__mro__[1].__module__.startswith("multilin.")
    return other.to(model.dtype).eval()


def hybrid(file: Path) -> MultilinForCausalLM:
    """A model of two versions of one file, a built-in layer and an `Architecture`."""
    first = MultilinConfig.from_architecture(f"{file}:Gru", hidden_size=8, num_layers=1, vocab_size=31).layers
    file.write_text(LAYERS.replace("depth=2", "depth=1"))
    file.with_name("gated-mean.py").write_text(ARCHITECTURE)
    names = "mingru", f"{file}:Gru", f"{file}:Loop", str(file.with_name("gated-mean.py"))
    layers = [*first, *({"architecture": name} for name in names)]
    return make("mingru", num_layers=None, layers=layers)


@pytest.mark.parametrize("name", [*NAMES, "hybrid"])
def test_the_folder_alone_gives_the_same_logits(
    file: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = hybrid(file) if name == "hybrid" else make(f"{file}:{name}")
    publish(model, tmp_path / f"alone_{name}")
    other = loaded_alone(model, tmp_path / f"alone_{name}", monkeypatch)
    ids, close = draw(2, 20), {"rtol": 1e-5, "atol": 1e-5}
    first = other(ids[:, :12], use_cache=True)
    rest = other(ids[:, 12:], past_key_values=first.past_key_values)
    torch.testing.assert_close(torch.cat([first.logits, rest.logits], 1), model(ids).logits, **close)
    made = [one.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0) for one in (model, other)]
    assert made[0].tolist() == made[1].tolist()


def test_multilin_finds_the_files_and_asks_for_trust(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, folder = hybrid(file), tmp_path / "asks"
    publish(model, folder)
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*own_*.py")} - {"architectures_own_file.py"}
    assert files == {"own_layers.py", "own_layers_.py", "own_gated_mean.py", "originals/own_gated_mean.py"}
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "another"))
    monkeypatch.setattr(own_file, "_sources", {})
    monkeypatch.setattr("multilin.files.trust._trusted", set())
    for trust_remote_code in (None, False, True):  # transformers does not hand it on
        with pytest.raises(InputError, match=r"asks/own_layers_?\.py is code that you have not run before"):
            AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=trust_remote_code)
    for name in ("own_layers.py", "own_layers_.py", "originals/own_gated_mean.py"):
        trust_code(folder / name)
    loaded = AutoModelForCausalLM.from_pretrained(folder).double()
    torch.testing.assert_close(loaded(draw(1, 9)).logits, model(draw(1, 9)).logits, rtol=1e-6, atol=1e-6)


def test_imports_of_other_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "some_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "other.py").write_text("SIZE = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    cases = {
        "from .other import SIZE": "mine cannot be published, because line 1 imports another file of its package; move",
        "import multilin": r"line 1 imports multilin; write `from MODULE import NAME`, with modules of multilin\.arch",
        "from multilin.model.state import TextState": r"line 1 imports multilin\.model\.state; write",
        "from some_package.other import SIZE": "",
    }
    for line, sentence in cases.items():
        (package / "mine.py").write_text(f"{line}\n{LAYERS}")
        model = make("some_package.mine:Gru")
        if sentence:
            with pytest.raises(InputError, match=sentence):
                publish(model, tmp_path / "refused")
            assert not (tmp_path / "refused").exists()
        else:
            assert "Install the package of some_package first" in publish(model, tmp_path / "published")
            assert (tmp_path / "published" / "own_mine.py").read_text() == f"{line}\n{LAYERS}"
