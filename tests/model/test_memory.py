"""What a model would take is known before it is built, and refused with the figure where the machine has less."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from multilin.analysis.compare.run import compare
from multilin.analysis.compare.sweep import Budget, Sweep
from multilin.analysis.costs import find_model
from multilin.analysis.evaluate.run import break_down_run
from multilin.analysis.explain.run import explain_run
from multilin.analysis.settings import EvaluationSettings, ModelSizes
from multilin.data.tokenizers import train_tokenizer
from multilin.errors import InputError
from multilin.inference.generate_run import generate_text
from multilin.inference.rollout import rollout_run
from multilin.inference.settings import GenerationSettings, RolloutSettings
from multilin.model.factory import create_model, model_names
from multilin.model.memory import activation_bytes, available_memory, check_memory, loss_bytes, parameter_bytes
from multilin.runs.load import Run, load_run
from multilin.training.loop import train
from multilin.training.recipe import load_recipe

SIZES = {"hidden_size": 64, "num_layers": 3, "vocab_size": 300, "n_positions": 64}


def kept_bytes(model: Any, num_rows: int, length: int) -> int:
    """What autograd really keeps of a forward pass, without the parameters."""
    storages: dict[int, tuple[int, Any]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = (storage.nbytes(), storage)
        return tensor

    ids = torch.zeros(num_rows, length, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.train()(ids, labels=ids, use_cache=False)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    return sum(size for address, (size, _) in storages.items() if address not in parameters)


@pytest.mark.parametrize("name", model_names())
def test_the_estimate_is_near_what_training_keeps_and_not_above(name: str) -> None:
    model = create_model(name, **SIZES)
    with torch.device("meta"):
        sketch = create_model(name, **SIZES)
    assert parameter_bytes(sketch) == parameter_bytes(model)
    estimate, kept = activation_bytes(sketch, 2 * 64), kept_bytes(model, 2, 64)
    assert 0.25 * kept < estimate < 1.15 * kept
    assert activation_bytes(sketch, 2 * 64, recomputes=True) <= estimate


def test_the_loss_holds_some_logits_at_a_time() -> None:
    """All of a small vocabulary, 2^26 numbers on a GPU of a large one; GPT-2 holds all, as part of its activations."""
    with torch.device("meta"):
        small, large = (create_model("additive", **{**SIZES, "vocab_size": size}) for size in (64, 2**15))
        gpt2 = create_model("gpt2", **SIZES)
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert loss_bytes(small, 128, cuda) == loss_bytes(small, 128, cpu) == 8 * 128 * 64
    assert (loss_bytes(large, 2**14, cuda), loss_bytes(large, 2**14, cpu)) == (8 * 2**26, 8 * 2**23)
    assert loss_bytes(gpt2, 128, cuda) == 0


def test_this_machine_says_what_it_has() -> None:
    left = available_memory()
    assert left is None or 2**20 < left < 2**60
    with pytest.raises(InputError, match=r"^it would take at least 1\.0 EB of memory, and this machine has .* left"):
        check_memory("it", 1e18)


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """little_memory(1e6): from now on the machine has a megabyte left."""
    return lambda left: monkeypatch.setattr("multilin.model.memory.available_memory", lambda device="cpu": left)


def test_training_is_refused_before_a_folder_is_written(tmp_path: Path, little_memory: Callable[[float], None]) -> None:
    little_memory(1e8)
    (tmp_path / "text.txt").write_text("the cat sat on the mat\n" * 500)
    output = tmp_path / "run"
    given = {"data.source": str(tmp_path / "text.txt"), "tokenizer.kind": "byte", "output": str(output)}
    for changes, words in (
        ({"model.hidden_size": 4096}, r"^model: hidden_size 4096, 6 layers, n_positions 256 and a vocabulary of"),
        ({"training.batch_size": 2000, "model.hidden_size": 32}, r"^training\.batch_size: 2000 blocks of 256 tokens"),
    ):
        with pytest.raises(
            InputError, match=words + r".* would take at least .* of memory, and this machine has 100\.0 MB left"
        ):
            train(load_recipe(None, {**given, **changes}))
        assert not output.exists()


def test_the_vocabulary_of_the_text_counts(tmp_path: Path, little_memory: Callable[[float], None]) -> None:
    """A task has its own, of which a recipe knows nothing."""
    little_memory(3e6)
    recipe = load_recipe(None, {
        "data.source": "task:mqar?num_keys=60000", "tokenizer.kind": "byte", "model.hidden_size": 8,
        "training.batch_size": 1, "output": str(tmp_path / "run"),
    })  # fmt: skip
    with pytest.raises(InputError, match="a vocabulary of 60035"):
        train(recipe)
    assert not (tmp_path / "run").exists()


def test_a_comparison_is_refused_before_it_begins(tmp_path: Path, little_memory: Callable[[float], None]) -> None:
    little_memory(1e8)
    row = {"model": {"architecture": "elita", "hidden_size": 4096}}
    with pytest.raises(InputError, match=r"^rows\.large: model: hidden_size 4096"):
        compare(Sweep({"large": row}, budget=Budget(tokens=1e6), output=str(tmp_path / "runs")))
    assert not (tmp_path / "runs").exists()


def test_a_new_model_is_described_where_it_fits(little_memory: Callable[[float], None]) -> None:
    little_memory(1e6)
    with pytest.raises(
        InputError, match=r"^--hidden-size: 256, 6 layers, .* this model would take at least [0-9.]+ MB"
    ):
        find_model("elita", ModelSizes())
    find_model("elita", ModelSizes(hidden_size=8, num_layers=1, vocab_size=10))


@pytest.fixture
def run(tmp_path: Path) -> Callable[[str], Run]:
    def load(name: str) -> Run:
        tokenizer = train_tokenizer([], "byte", None)
        model = create_model(name, **{**SIZES, "vocab_size": len(tokenizer)}, eos_token_id=0, pad_token_id=1)
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        return load_run(tmp_path / name)

    return load


@pytest.mark.parametrize("name", ["elita", "linear_mixer", "gpt2"])
def test_reading_and_searching_is_refused(
    name: str, run: Callable[[str], Run], tmp_path: Path, little_memory: Callable[[float], None]
) -> None:
    loaded = run(name)
    (tmp_path / "text.txt").write_text("the cat sat on the mat\n" * 500)
    little_memory(2e4)
    with pytest.raises(InputError, match=r"^prompt: 41 tokens given, but reading 1 x 41 tokens at once would take"):
        generate_text(loaded, "x" * 40, GenerationSettings(max_new_tokens=2))
    little_memory(1e6)
    words = r"^prompt: 41 tokens given, but reading 900 x 41 tokens at once would take"
    with pytest.raises(InputError, match=words):
        generate_text(loaded, "x" * 40, GenerationSettings(num_beams=900, max_new_tokens=2))
    with pytest.raises(InputError, match=r"^batch_size: 1000 given, but reading \d+ x \d+ tokens at once would take"):
        break_down_run(loaded, EvaluationSettings(source=str(tmp_path / "text.txt"), batch_size=1000))
    little_memory(2e4)
    with pytest.raises(InputError, match=r"^run: .*config\.json: this model would take"):
        load_run(loaded.folder)


def test_what_looks_at_all_pairs_is_refused(
    run: Callable[[str], Run], monkeypatch: pytest.MonkeyPatch, little_memory: Callable[[float], None]
) -> None:
    loaded = run("linear_mixer")
    little_memory(1e5)
    with pytest.raises(InputError, match=r"^num_steps: 9 given, but a rollout would take"):
        rollout_run(loaded, "x", RolloutSettings(num_steps=9))
    monkeypatch.setattr("multilin.analysis.explain.run.PAIR_BYTES", 10**6)
    little_memory(1e9)
    with pytest.raises(InputError, match=r"^text: 40 tokens given, but explaining them would take at least 8\.4 GB"):
        explain_run(loaded, "x" * 40)
