"""State files: what no model has written is refused in one sentence.

Wrong numbers, shapes and lengths are in tests/contract/test_state_files.py, for every architecture.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from multilin import InputError, MultilinForCausalLM
from multilin.inference.snapshot import Snapshot, load_snapshot, save_snapshot
from multilin.inference.state_file import MOST_ROWS, RNG_STATE, StateTensor, check_tensors, checksum
from multilin.model.factory import create_model

ROWS, LONGEST, VOCAB_SIZE = 2, 64, 13


@pytest.fixture
def model() -> MultilinForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_layers": 2, "vocab_size": VOCAB_SIZE, "n_positions": LONGEST}
    return create_model("additive", **sizes, options={"num_heads": 2}).eval()


@pytest.fixture
def state_file(model: MultilinForCausalLM, tmp_path: Path) -> Path:
    """The state of two texts of nine tokens."""
    with torch.no_grad():
        state = model(torch.arange(18).view(ROWS, 9) % VOCAB_SIZE).past_key_values
    save_snapshot(Snapshot(state, [[3], [4]], torch.get_rng_state()), tmp_path / "text.state", model)
    return tmp_path / "text.state"


def rewrite(path: Path, change: Callable[[dict[str, str], dict[str, Tensor]], object], *, seal: bool = True) -> None:
    """Change the content of a state file; `seal` gives it the checksum of what it then holds."""
    with safe_open(path, framework="pt") as file:
        metadata, tensors = dict(file.metadata()), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(metadata, tensors)
    if seal:
        del metadata["sha256"]
        metadata["sha256"] = checksum(metadata, {name: _numbers(tensor) for name, tensor in tensors.items()})
    save_file(tensors, path, metadata)


def _numbers(tensor: Tensor) -> Any:
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def refused(path: Path, model: MultilinForCausalLM, match: str) -> None:
    with pytest.raises(InputError, match=match) as refusal:
        load_snapshot(path, model)
    assert str(refusal.value).startswith(f"state file: {path} ")
    assert "\n" not in str(refusal.value)


def repeat(times: int) -> Callable[[dict[str, str], dict[str, Tensor]], object]:
    def change(metadata: dict[str, str], tensors: dict[str, Tensor]) -> None:
        for name in set(tensors) - {RNG_STATE}:
            tensors[name] = tensors[name][:1].expand(times, *tensors[name].shape[1:]).contiguous()
        metadata["unread_ids"] = json.dumps([[]] * times)

    return change


CONTENTS: dict[str, tuple[Callable[[dict[str, str], dict[str, Tensor]], object], str]] = {
    "a tensor more": (lambda m, t: t.update(more=torch.zeros(ROWS)), "holds a tensor of another name, more"),
    "a tensor less": (lambda m, t: t.pop("embedding.document_B"), "lacks embedding.document_B"),
    "no rows": (repeat(0), "holds 0 rows"),
    "unread of one row": (lambda m, t: m.update(unread_ids="[[1]]"), "unread_ids: should be a list"),
    "unread text": (lambda m, t: m.update(unread_ids='"ab"'), "unread_ids: should be a list"),
    "unread tokens": (lambda m, t: m.update(unread_ids="[1, 2]"), "unread_ids: should be a list"),
    "unread truth": (lambda m, t: m.update(unread_ids="[[true], []]"), "unread_ids: True given"),
    "unread half": (lambda m, t: m.update(unread_ids="[[0.5], []]"), "unread_ids: 0.5 given"),
    "unread negative": (lambda m, t: m.update(unread_ids="[[-1], []]"), "unread_ids: -1 given"),
    "unread unknown": (lambda m, t: m.update(unread_ids=f"[[{VOCAB_SIZE}], []]"), f"unread_ids: {VOCAB_SIZE} given"),
    "unread depth": (lambda m, t: m.update(unread_ids="[" * 100_000), "not JSON"),
    "unread digits": (lambda m, t: m.update(unread_ids=f"[[{'9' * 5000}], []]"), "not JSON"),
    "random size": (lambda m, t: t.update({RNG_STATE: t[RNG_STATE][:-1].clone()}), "has shape"),
    "random dtype": (lambda m, t: t.update({RNG_STATE: t[RNG_STATE].to(torch.int8)}), "holds torch.int8"),
    "random content": (lambda m, t: t[RNG_STATE].fill_(255), "not the state of a generator"),
    "metadata more": (lambda m, t: m.update(more="x"), "its metadata should be"),
    "metadata less": (lambda m, t: m.pop("unread_ids"), "its metadata should be"),
    "other format": (lambda m, t: m.update(format="x"), "is not a state of a text"),
    "other model": (lambda m, t: m.update(model="x"), "belongs to another model"),
}


@pytest.mark.parametrize("kind", CONTENTS)
def test_what_no_model_writes_is_refused(model: MultilinForCausalLM, state_file: Path, kind: str) -> None:
    change, message = CONTENTS[kind]
    rewrite(state_file, change)
    refused(state_file, model, message)


def test_a_content_of_another_checksum_is_refused(model: MultilinForCausalLM, state_file: Path) -> None:
    rewrite(state_file, lambda metadata, tensors: tensors["embedding.document_B"].fill_(1), seal=False)
    refused(state_file, model, "checksum")


@pytest.mark.parametrize("rows", [1, 3, 100])
def test_any_number_of_rows_is_read(model: MultilinForCausalLM, state_file: Path, rows: int) -> None:
    rewrite(state_file, repeat(rows))
    loaded = load_snapshot(state_file, model)
    assert (loaded.state.batch_size, len(loaded.unread_ids)) == (rows, rows)


def test_the_model_is_left_in_training(model: MultilinForCausalLM, state_file: Path, monkeypatch: Any) -> None:
    model.train()
    model.lm_head.eval()  # as one freezes a part of a model
    load_snapshot(state_file, model)
    assert (model.training, model.model.training, model.lm_head.training) == (True, True, False)
    monkeypatch.setattr(model, "forward", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        load_snapshot(state_file, model)
    assert model.training


def test_what_could_not_be_read_back_is_not_written(model: MultilinForCausalLM, state_file: Path) -> None:
    good = load_snapshot(state_file, model)
    content = state_file.read_bytes()
    for bad, message in (
        (Snapshot(good.state, [[1]]), "state: unread_ids: should be a list of token ids for each of its 2 rows"),
        (Snapshot(good.state, [[VOCAB_SIZE], []]), f"state: unread_ids: {VOCAB_SIZE} given"),
        (Snapshot(good.state.map(lambda t: t * torch.nan if t.is_floating_point() else t)), "are not finite"),
    ):
        with pytest.raises(InputError, match=message):
            save_snapshot(bad, state_file, model)
    assert state_file.read_bytes() == content
    save_snapshot(Snapshot(good.state), state_file, model)
    assert load_snapshot(state_file, model).unread_ids == [[]] * ROWS


def test_more_rows_than_can_be_are_refused() -> None:
    with pytest.raises(InputError, match=f"holds {MOST_ROWS + 1} rows"):
        check_tensors({"x": ([MOST_ROWS + 1, 3], "float32")}, [StateTensor("x", [3], "float32", "summary")])


@pytest.mark.parametrize("path", [".", "/dev/zero"])
def test_only_files_are_read(model: MultilinForCausalLM, path: str) -> None:
    refused(Path(path), model, "is not a file")
