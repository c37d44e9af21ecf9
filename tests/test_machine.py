"""The warning about busy cores."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from multilin import machine


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """two_cores(all=[1.8], own=0.2): cores that all processes, and this one, keep busy while it is measured."""

    def make(all: list[float], own: float) -> None:
        clock, busy, rates = [0.0], [1000.0], list(all)

        def sleep(seconds: float) -> None:
            clock[0] += seconds
            busy[0] += seconds * (rates.pop(0) if len(rates) > 1 else rates[0])

        monkeypatch.setattr(machine.time, "sleep", sleep)
        monkeypatch.setattr(machine.time, "monotonic", lambda: clock[0])
        monkeypatch.setattr(machine, "_busy_seconds", lambda: busy[0])
        monkeypatch.setattr(machine, "_own_seconds", lambda: 500.0 + own * clock[0])
        monkeypatch.setattr(machine, "available_cores", lambda: 2)

    return make


@pytest.mark.parametrize(
    ("num_threads", "all_processes", "own", "policy", "warns"),
    [
        (2, [1.0], 0.0, "", True),
        (2, [0.3], 0.0, "", False),
        (2, [2.0], 1.9, "", False),  # it is this process that computes
        (2, [1.5, 0.1], 0.0, "", False),  # another one that has just ended
        (1, [1.0], 0.0, "", False),
        (1, [2.0], 0.0, "", False),  # one thread waits for no other
        (2, [2.0], 0.0, "PASSIVE", False),
        (2, [2.0], 0.0, "active", True),
    ],
)
def test_busy_cores_are_told_where_threads_would_wait(
    two_cores: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    num_threads: int,
    all_processes: list[float],
    own: float,
    policy: str,
    warns: bool,
) -> None:
    two_cores(all_processes, own)
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    sentence = machine.contention()
    assert (sentence is not None) == warns
    if sentence:
        assert f"other programs keep {all_processes[0]:.1f} of 2 cores busy" in sentence


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="the system does not tell what its cores do")
def test_the_work_of_all_processes_includes_ours() -> None:
    all_before, own_before = machine._busy_seconds(), machine._own_seconds()
    while machine._own_seconds() - own_before < 0.3:
        sum(range(10_000))
    # The system counts in hundredths of a second.
    assert machine._busy_seconds() - all_before > 0.2


def test_nothing_is_said_where_the_system_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_busy_seconds", lambda: None)
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("waited for nothing"))
    monkeypatch.setattr(torch, "get_num_threads", lambda: os.cpu_count() or 1)
    assert machine.contention() is None
