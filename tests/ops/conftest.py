"""Fixtures for the tests of ops."""

import pytest

from tests.ops.poison import poison_memory


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody wrote to is nan."""
    poison_memory(monkeypatch)
