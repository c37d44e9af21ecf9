"""Where Triton's kernels are tested: small shapes anywhere, large ones (marked gpu) on a card only."""

from typing import Any

import pytest
import torch

from multilin.ops.kernels import is_interpreted


@pytest.fixture
def device() -> torch.device:
    """Where kernels run: compiled on a card; else on the CPU, interpreted."""
    pytest.importorskip("triton")
    return torch.device("cpu" if is_interpreted() else "cuda")


@pytest.fixture(autouse=True)
def one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are compiled in the first way that would be tried: all ways of so many kinds of calls take very long."""
    if not is_interpreted():
        from triton.runtime.autotuner import Autotuner

        monkeypatch.setattr(Autotuner, "run", run_first_way)


def run_first_way(autotuner: Any, *args: Any, **more: Any) -> Any:
    """In place of Triton's `Autotuner.run`."""
    return autotuner.fn.run(*args, **more, **autotuner.configs[0].all_kwargs())
