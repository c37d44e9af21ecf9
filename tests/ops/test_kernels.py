"""What the kernels of all ops have in common."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from multilin.ops.kernels import operator


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
