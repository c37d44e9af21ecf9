"""The warning about busy cores."""

import os

import pytest
import torch

from multilin import machine


@pytest.mark.parametrize(
    ("num_threads", "load", "policy", "warns"),
    [
        (2, 1.6, "", True),
        (2, 0.3, "", False),
        (1, 5.0, "", False),
        (2, 5.0, "PASSIVE", False),
        (2, 5.0, "active", True),
    ],
)
def test_busy_cores_are_told_where_threads_would_wait(monkeypatch, num_threads, load, policy, warns) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(machine, "available_cores", lambda: 2)
    monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    found = machine.contention()
    assert (found is not None) == warns
    if found:
        assert f"load {load}" in found
