"""Where Triton's kernels are tested: small shapes anywhere, large ones (marked gpu) on a card only."""

from functools import partialmethod
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
def one_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are compiled in one of the ways that would be tried: all, for so many kinds of calls, take very long.

    It is the first one, or that of the test's parameter `way`.
    """
    if not is_interpreted():
        from triton.runtime.autotuner import Autotuner

        parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
        monkeypatch.setattr(Autotuner, "run", partialmethod(run_one_way, parameters.get("way", 0)))


def run_one_way(autotuner: Any, way: int, *args: Any, **more: Any) -> Any:
    """In place of Triton's `Autotuner.run`; the last of the ways where there are not so many."""
    config = autotuner.configs[min(way, len(autotuner.configs) - 1)]
    return autotuner.fn.run(*args, **more, **config.all_kwargs())
