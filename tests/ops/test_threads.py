"""Threads that make room for other programs."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from multilin.ops import threads

Cores = Callable[[float], None]


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> Cores:
    """two_cores(0.9): half a second goes by in which others compute on so many of two cores, and this on one."""
    clock, others = [0.0], [0.0]
    monkeypatch.setattr(threads.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(threads, "busy_seconds", lambda: 1000.0 + others[0] + clock[0])
    monkeypatch.setattr(threads, "own_seconds", lambda: 500.0 + clock[0])
    monkeypatch.setattr(threads, "available_cores", lambda: 2)
    now = [2]
    monkeypatch.setattr(torch, "get_num_threads", lambda: now[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda number: now.__setitem__(0, number))

    def pass_by(cores: float) -> None:
        clock[0] += threads.SECONDS
        others[0] += cores * threads.SECONDS

    return pass_by


def after(two_cores: Cores, *cores: float) -> list[int]:
    """The number of threads after each half second in which other programs computed on so many cores."""
    numbers = []
    for number in cores:
        two_cores(number)
        threads.adapt()
        numbers.append(torch.get_num_threads())
    return numbers


def test_threads_go_when_others_need_a_core_and_come_back(two_cores: Cores) -> None:
    with threads.following_load():
        assert after(two_cores, 0.0, 0.3, 0.7, 1.0, 0.1) == [2, 2, 1, 1, 2]


def test_one_thread_is_left_and_the_user_has_all_back_at_the_end(two_cores: Cores) -> None:
    with threads.following_load():
        assert after(two_cores, 2.0, 5.0) == [1, 1]
    assert torch.get_num_threads() == 2


def test_there_are_never_more_threads_than_at_the_beginning(two_cores: Cores) -> None:
    torch.set_num_threads(1)
    with threads.following_load():
        assert after(two_cores, 0.0, 1.0, 0.0) == [1, 1, 1]


def test_a_program_that_imports_the_package_keeps_its_threads(two_cores: Cores) -> None:
    assert after(two_cores, 1.0, 2.0) == [2, 2]
    assert threads.free_cores() == 2


def test_nothing_changes_where_the_system_does_not_tell(two_cores: Cores, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "busy_seconds", lambda: None)
    with threads.following_load():
        assert after(two_cores, 2.0) == [2]


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="the system does not tell what its cores do")
def test_the_work_of_all_processes_includes_ours() -> None:
    all_before, own_before = threads.busy_seconds(), threads.own_seconds()
    assert all_before is not None
    while threads.own_seconds() - own_before < 0.3:
        sum(range(10_000))
    # The system counts in hundredths of a second.
    assert (threads.busy_seconds() or 0.0) - all_before > 0.2
