from pathlib import Path

import pytest
import torch

from multilin.errors import InputError
from multilin.runs import checkpoints


def write(folder: Path, step: int, keep: int = 2) -> None:
    with checkpoints.published(folder, step, keep) as part:
        (part / "weights").write_text(str(step))


def test_only_the_newest_are_kept_in_order_of_their_steps(tmp_path: Path) -> None:
    for step in (9, 10, 100):
        write(tmp_path, step)
    assert [path.name for path in checkpoints.checkpoints(tmp_path)] == ["checkpoint-10", "checkpoint-100"]


def test_a_failed_checkpoint_leaves_no_trace(tmp_path: Path) -> None:
    write(tmp_path, 1, keep=1)

    def fail() -> None:
        with checkpoints.published(tmp_path, 2, keep=1) as part:
            (part / "weights").write_text("half")
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]


def test_what_a_killed_process_left_is_no_checkpoint_and_goes(tmp_path: Path) -> None:
    write(tmp_path, 1)
    checkpoints.partial_folder(tmp_path, 2).mkdir()
    assert [path.name for path in checkpoints.checkpoints(tmp_path)] == ["checkpoint-1"]
    write(tmp_path, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1", "checkpoint-3"]


def test_an_optimizer_state_returns_bit_for_bit(tmp_path: Path) -> None:
    tensors = {"a.weight": {"exp_avg": torch.randn(3, 5).T, "step": torch.tensor(7.0)}}
    groups = [{"lr": 0.1 / 3, "betas": (0.9, 0.999), "fused": True, "params": ["a.weight"]}]
    checkpoints.write_optimizer(tmp_path, {"state": tensors, "param_groups": groups})
    found = checkpoints.read_optimizer(tmp_path)
    assert found["param_groups"] == groups
    for slot, tensor in tensors["a.weight"].items():
        assert torch.equal(found["state"]["a.weight"][slot], tensor)


@pytest.mark.parametrize("name", ["optimizer.safetensors", "optimizer.json"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    checkpoints.write_optimizer(tmp_path, {"state": {"w": {"step": torch.zeros(100)}}, "param_groups": []})
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=name):
        checkpoints.read_optimizer(tmp_path)
