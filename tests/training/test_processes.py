"""The device that a machine has."""

import pytest
import torch

from multilin.machine import examine
from multilin.training.processes import accelerator_or_cpu


def test_a_build_for_cuda_on_a_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def current_accelerator(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current_accelerator)
    assert accelerator_or_cpu() == torch.device("cpu")
    assert examine().device.startswith("cpu")
