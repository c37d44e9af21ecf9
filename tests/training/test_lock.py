"""One trainer at a time in a folder."""

import errno
import os
import signal
import socket
import threading
from pathlib import Path

import pytest
import torch

from multilin.analysis.compare.run import compare
from multilin.analysis.compare.sweep import Budget, Sweep
from multilin.errors import InputError
from multilin.files.lock import LOCK_FILE, locked_folder
from multilin.training.loop import train
from multilin.training.outcomes import RunResult
from tests.training.conftest import AtStep, Tiny, assert_same_run

IN_USE = rf"in use by process {os.getpid()} on '{socket.gethostname()}'"


def test_a_second_trainer_is_refused_by_name(
    tiny: Tiny, tmp_path: Path, at_step: AtStep, uninterrupted: RunResult
) -> None:
    (tmp_path / "link").symlink_to("run")
    tried = []

    def train_too(model: torch.nn.Module) -> None:
        for choice in ({}, {"overwrite": True}, {"resume": True}):
            for folder in ("run", "link"):
                with pytest.raises(InputError, match=IN_USE):
                    train(tiny(tmp_path / folder, **{"training.seed": 1}), **choice)
                tried.append(choice)
        sweep = Sweep(rows={"row": {}}, seeds=[0], budget=Budget(tokens=1.0), output=str(tmp_path / "run"))
        with pytest.raises(InputError, match=IN_USE):
            compare(sweep)

    at_step(7, train_too)
    result = train(tiny(tmp_path / "run"))
    assert len(tried) == 6
    assert_same_run(result.output, uninterrupted.output)
    assert {path.name for path in result.output.glob(".*")} == set()


def test_a_killed_process_holds_no_lock(tmp_path: Path) -> None:
    folder, (reading, writing) = tmp_path / "run", os.pipe()
    if (child := os.fork()) == 0:
        with locked_folder("output", folder):
            os.write(writing, b"locked")
            signal.pause()
    os.read(reading, 6)
    with pytest.raises(InputError, match=f"in use by process {child} on"), locked_folder("output", folder):
        pytest.fail("two processes hold one lock")
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert (folder / LOCK_FILE).exists()
    with locked_folder("output", folder), pytest.raises(InputError, match=IN_USE), locked_folder("output", folder):
        pytest.fail("two hold one lock")


def test_a_folder_that_stayed_empty_goes_and_others_stay(tmp_path: Path) -> None:
    with locked_folder("output", tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b" / LOCK_FILE).exists()
    assert list(tmp_path.iterdir()) == []
    with locked_folder("output", tmp_path / "a" / "b"):
        (tmp_path / "a" / "file").touch()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["file"]


def test_a_full_disk_leaves_no_folder_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", is_full)
        with locked_folder("output", tmp_path / "a" / "b"):
            pass
    assert list(tmp_path.iterdir()) == []
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", is_full)
        with (
            pytest.raises(InputError, match=r"a/b cannot be written \(No space left on device\)"),
            locked_folder("output", tmp_path / "a" / "b"),
        ):
            pytest.fail("locked")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"process": "x", "host": 1}'])
def test_a_holder_without_a_name_still_holds(tmp_path: Path, content: bytes) -> None:
    with locked_folder("output", tmp_path):
        (tmp_path / LOCK_FILE).write_bytes(content)
        with pytest.raises(InputError, match="in use by another process"), locked_folder("output", tmp_path):
            pytest.fail("two hold one lock")


def test_no_link_is_followed_to_the_lock(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    (tmp_path / LOCK_FILE).symlink_to("precious")
    with pytest.raises(InputError, match="cannot be written"), locked_folder("output", tmp_path):
        pytest.fail("locked")
    assert (tmp_path / "precious").read_text() == "precious"


def test_where_there_are_no_locks_a_warning_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multilin.files.lock.fcntl", None)
    with pytest.warns(UserWarning, match="cannot be locked"), locked_folder("output", tmp_path):
        pass


def test_a_process_may_wait_for_the_lock(tmp_path: Path) -> None:
    order: list[str] = []

    def wait() -> None:
        with locked_folder("output", tmp_path, waits=True):
            order.append("second")

    with locked_folder("output", tmp_path):
        waiting = threading.Thread(target=wait)
        waiting.start()
        waiting.join(0.2)
        order.append("first")
    waiting.join(10)
    assert order == ["first", "second"]
