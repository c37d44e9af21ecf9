"""The verb publish: a folder for the hub that loads in an environment without multilin."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
import yaml

from multilin import MultilinForCausalLM, trust_code
from tests.architectures.test_own_file import LAYERS

Call = Callable[..., str]
LEFT_OUT = ("multilin", "__editable__", "jaxtyping", "numba", "llvmlite", "triton", "annotated_types", "pydantic")


def test_names_models_and_folders_that_cannot_be_published_are_refused(
    additive: Path, run_folder: Callable[[str], Path], refusal: Call, tmp_path: Path
) -> None:
    folder = tmp_path / "hub"
    assert "name: 'letters' given" in refusal("publish", additive, "letters")
    for name in ("../x/y", "x/y--z", "x/y..z", "x/y.git", "x/y-", "x-/y", "x/y.", "ä/y"):
        assert f"name: '{name}' given" in refusal("publish", additive, name)
    assert "nothing is uploaded" in refusal("publish", additive, "someone/letters", "--private", "--folder", folder)
    assert "gpt2 model given, which transformers loads; upload its folder" in refusal(
        "publish", run_folder("gpt2"), "someone/letters", "--folder", folder
    )
    assert not folder.exists()


def test_the_card_names_no_folder_of_this_machine(additive: Path, cli: Call, tmp_path: Path) -> None:
    run = shutil.copytree(additive, tmp_path / "run")
    recipe = {
        "data": {"source": "/home/someone/my texts/books", "validation": "~/texts/*.md", "name": "a/b"},
        "output": "a long name of a folder, " * 6 + "that goes on",
        "training": {},
    }
    text = f"# Run\n\nTrained from `/home/someone/start`, 3 tokens / s.\n\n```yaml\n{yaml.safe_dump(recipe)}```\n"
    (run / "README.md").write_text(text)
    cli("publish", run, "someone/letters", "--folder", tmp_path / "hub")
    published = (tmp_path / "hub" / "README.md").read_text()
    assert "output:" not in published
    assert "Trained from `./start`, 3 tokens / s." in published
    data = {"source": "./books", "validation": "./*.md", "name": "a/b"}
    assert yaml.safe_load(published.split("```")[1].removeprefix("yaml")) == {"data": data, "training": {}}


def test_without_network_the_folder_is_complete_and_the_upload_is_refused(
    additive: Path, refusal: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(self: object, *_: object, **__: object) -> None:
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", unreachable)
    folder = tmp_path / "hub"
    said = refusal("publish", additive, "someone/letters", "--upload", "--folder", folder)
    assert "someone/letters was not uploaded (no route to the hub)" in said
    assert f"hf upload someone/letters {folder}" in said
    assert (folder / "model.safetensors").is_file()


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all installed packages but multilin and what only multilin needs."""
    folder = tmp_path_factory.mktemp("environment")
    for path in Path(transformers.__file__).parents[1].iterdir():
        if not path.name.lower().startswith(LEFT_OUT):
            (folder / path.name).symlink_to(path)
    return folder


SCRIPT = """
import importlib.util, json, sys
assert importlib.util.find_spec("multilin") is None and importlib.util.find_spec("jaxtyping") is None
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
for folder in (sys.argv[1], sys.argv[2]):
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    inputs = tokenizer("the cat sat", return_tensors="pt")
    model.save_pretrained(sys.argv[2])
    tokenizer.save_pretrained(sys.argv[2])
    ids = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0].tolist()
    print(json.dumps([model(**inputs).logits[0].tolist(), ids]))
"""


@pytest.mark.slow
def test_a_published_run_loads_without_multilin_and_can_be_saved_again(
    additive: Path, cli: Call, environment: Path, tmp_path: Path
) -> None:
    check_loads_alone(additive, cli, environment, tmp_path)


@pytest.mark.slow
def test_a_layer_of_a_users_file_loads_without_multilin(
    run_folder: Callable[[str], Path], cli: Call, environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "layers.py").write_text(LAYERS)
    trust_code(tmp_path / "layers.py")
    check_loads_alone(run_folder(f"{tmp_path}/layers.py:Gru"), cli, environment, tmp_path)


def check_loads_alone(run: Path, cli: Call, environment: Path, tmp_path: Path) -> None:
    cli("publish", run, "someone/letters", "--folder", tmp_path / "hub")
    assert 'from_pretrained("someone/letters", trust_remote_code=True)' in (tmp_path / "hub" / "README.md").read_text()
    home = {"PATH": os.environ["PATH"], "PYTHONPATH": str(environment), "HF_HOME": str(tmp_path / "cache")}
    base = Path(sys.base_prefix) / "bin" / "python3"
    done = subprocess.run(
        [base, "-c", SCRIPT, tmp_path / "hub", tmp_path / "again"],
        env=home, capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    first, second = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("[["))
    assert first == second
    model = MultilinForCausalLM.from_pretrained(run)
    tokenizer = transformers.AutoTokenizer.from_pretrained(run)
    expected = model(**tokenizer("the cat sat", return_tensors="pt")).logits[0]
    torch.testing.assert_close(torch.tensor(first[0]), expected, rtol=1e-4, atol=1e-2)
