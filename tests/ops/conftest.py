"""Fixtures for the tests of ops."""

import pytest
import torch

from tests.ops.comparing import poison_memory


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody wrote to is nan."""
    poison_memory(monkeypatch)


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU kernels run on so many threads, however little there is to do."""
    monkeypatch.setattr("multilin.ops.kernels.cpu_launch.SMALL", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: request.param)
