"""What the kernels of all ops have in common, and the files in which numba keeps those it compiled."""

from collections import Counter
from pathlib import Path

import numba
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from multilin.ops.int8.cpu import CpuSteps
from multilin.ops.kernels import cpu_launch as launch
from multilin.ops.kernels import is_exported, operator
from multilin.ops.tile_norm import tile_norm


def test_an_operator_runs_where_the_gpu_of_its_tensors_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = torch.device("cuda:0"), torch.device("cuda:1")
    current, seen = [first], []

    class Device:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def __enter__(self) -> None:
            current.append(self.device)

        def __exit__(self, *_: object) -> None:
            current.pop()

    @operator("test_current_gpu", lambda number, x: torch.empty_like(x))
    def current_gpu(number: int, x: Tensor) -> Tensor:
        seen.append(current[-1])
        return x.clone()

    monkeypatch.setattr(torch.cuda, "device", Device)
    with FakeTensorMode() as mode:
        current_gpu.compute(1, FakeTensor(mode, torch.empty(2, device="meta"), second))
    current_gpu.operator(1, torch.zeros(2))  # without a GPU nothing is made current
    assert seen == [second, first]
    assert current == [first]


@pytest.mark.parametrize("is_exporting", [True, False])
@pytest.mark.parametrize("is_dynamo", [True, False])
def test_a_call_that_dynamo_traces_is_no_export(
    is_exporting: bool, is_dynamo: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch 2.11 answers that it exports whenever Dynamo traces."""
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: is_exporting)
    monkeypatch.setattr(torch.compiler, "is_dynamo_compiling", lambda: is_dynamo)
    assert is_exported() == (is_exporting and not is_dynamo)


def test_processes_that_compile_for_different_types_share_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numba changes the index of its files without a lock, so an index must have one entry only."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(launch, "_compiled", launch._compiled.__wrapped__)
    for dtype in (torch.float32, torch.bfloat16):
        tile_norm(torch.ones(2, 8, dtype=dtype))
        CpuSteps.round_rows(torch.ones(2, 8, dtype=dtype))
    indices = [path.name.removesuffix(".nbi") for path in tmp_path.rglob("*.nbi")]
    entries = Counter(path.name.rsplit(".", 2)[0] for path in tmp_path.rglob("*.nbc"))
    assert len(indices) == 4
    assert entries == Counter(indices)
