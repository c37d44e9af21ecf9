"""Output files and folders: complete or absent, and never in place of what is no file."""

import os
import re
import resource
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from multilin.errors import InputError
from multilin.files import (
    LONGEST_NAME,
    atomic_file,
    atomic_files,
    atomic_folder,
    beside,
    check_folder,
    check_writable,
    remove_partials,
    write_whole,
)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(path))  # its address is at most 108 bytes long


def make_circle(path: Path) -> None:
    path.symlink_to(path.with_name("other"))
    path.with_name("other").symlink_to(path)


NO_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "folder": (Path.mkdir, "is a folder; give a file"),
    "pipe": (os.mkfifo, "is a pipe; give a file"),
    "socket": (make_socket, "is a socket; give a file"),
    "link to a device": (lambda path: path.symlink_to("/dev/null"), "is a device; give a file"),
    "link to a folder": (lambda path: path.symlink_to("."), "is a folder; give a file"),
    "link to stdout": (lambda path: path.symlink_to("/dev/stdout"), "belongs to the system"),
    "links in a circle": (make_circle, "is a link that leads nowhere; give a file"),
    "link into a folder that is missing": (lambda path: path.symlink_to("no/where"), "the folder .* does not exist"),
}


@pytest.mark.parametrize("kind", NO_FILES)
def test_only_files_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "output"
    make, message = NO_FILES[kind]
    make(path)
    before = path.lstat()
    for write in (check_writable, lambda name, path: write_whole(path, "content")):
        with pytest.raises(InputError, match=message):
            write("--output", path)
    assert (path.lstat().st_ino, path.lstat().st_mode) == (before.st_ino, before.st_mode)
    assert {entry.name for entry in tmp_path.iterdir()} <= {"output", "other"}


@pytest.mark.parametrize("path", ["/dev/null", "/dev/stdout", "/dev/fd/1", "/proc/new", "/proc/self/fd/1", "/sys/new"])
@pytest.mark.parametrize("check", [check_writable, check_folder])
def test_devices_and_system_folders_are_refused(check: Callable[[str, str], object], path: str) -> None:
    with pytest.raises(InputError, match=rf"^--output: {path} "):
        check("--output", path)


@pytest.mark.parametrize(
    "path", ["", "a\0b", "x" * (LONGEST_NAME + 1), "é" * (LONGEST_NAME // 2 + 1), "new/" + "x" * 300, "x/" * 5000]
)
@pytest.mark.parametrize("check", [check_writable, check_folder])
def test_impossible_names_are_one_short_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check: Callable[[str, str], object], path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"^--output: ") as refusal:
        check("--output", path)
    assert len(str(refusal.value)) < 400
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["x" * LONGEST_NAME, "é" * (LONGEST_NAME // 2)])
def test_the_longest_name_is_possible(tmp_path: Path, name: str) -> None:
    write_whole(tmp_path / name, "content")
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


def test_links_are_followed_and_permissions_kept(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("old")
    (tmp_path / "folder" / "file").chmod(0o640)
    (tmp_path / "first").symlink_to("second")
    (tmp_path / "second").symlink_to(tmp_path / "folder" / "file")
    write_whole(tmp_path / "first", "new")
    assert (tmp_path / "first").is_symlink()
    assert (tmp_path / "folder" / "file").read_text() == "new"
    assert stat.S_IMODE((tmp_path / "folder" / "file").stat().st_mode) == 0o640
    assert [entry.name for entry in (tmp_path / "folder").iterdir()] == ["file"]
    (tmp_path / "new").symlink_to("target")
    write_whole(tmp_path / "new", "content")
    assert (tmp_path / "target").read_text() == "content"


def test_a_new_file_has_the_permissions_of_any_other(tmp_path: Path) -> None:
    with atomic_file(tmp_path / "tensors") as partial:
        save_file({"x": torch.zeros(1)}, partial)
    with atomic_folder(tmp_path / "folder") as partial:
        save_file({"x": torch.zeros(1)}, partial / "tensors")
    (tmp_path / "other").touch()
    modes = {(tmp_path / name).stat().st_mode for name in ("tensors", "folder/tensors", "other")}
    assert len(modes) == 1


@pytest.fixture
def small_disk() -> Iterator[None]:
    """No file may be longer than 10,000 bytes, as if the disk were full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


WRITES: dict[str, Callable[[Path], object]] = {
    "bytes": lambda partial: partial.write_bytes(bytes(100_000)),
    "tensors": lambda partial: save_file({"x": torch.zeros(100_000)}, partial),
    "tokenizer": lambda partial: Tokenizer(WordLevel({str(n): n for n in range(10_000)})).save(str(partial)),
}


@pytest.mark.usefixtures("small_disk")
@pytest.mark.parametrize("kind", WRITES)
def test_what_cannot_be_written_leaves_the_old_and_names_the_file(tmp_path: Path, kind: str) -> None:
    (tmp_path / "output").write_text("old")
    with (
        pytest.raises(OSError, match=re.escape("File too large")) as failure,
        atomic_file(tmp_path / "output") as partial,
    ):
        WRITES[kind](partial)
    assert failure.value.filename == str(tmp_path / "output")
    with (
        pytest.raises(OSError, match=re.escape("File too large")) as failure,
        atomic_folder(tmp_path / "new") as partial,
    ):
        WRITES[kind](partial / "file")
    assert failure.value.filename == str(tmp_path / "new")
    assert [entry.name for entry in tmp_path.iterdir()] == ["output"]
    assert (tmp_path / "output").read_text() == "old"


def test_a_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    with atomic_folder(folder) as partial:
        (partial / "inner").mkdir()
        (partial / "inner" / "first").touch()
        assert not folder.exists()
    (tmp_path / "link").symlink_to("folder")
    with atomic_folder(tmp_path / "link") as partial:
        (partial / "second").touch()
        assert (folder / "inner" / "first").exists()
    assert [entry.name for entry in folder.iterdir()] == ["second"]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["folder", "link"]


def test_files_are_moved_into_a_folder_beside_others(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("kept")
    (tmp_path / "replaced").write_text("old")
    with atomic_files(tmp_path) as partial:
        (partial / "replaced").write_text("new")
        (partial / "added").write_text("new")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "kept": "kept", "replaced": "new", "added": "new",
    }  # fmt: skip


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    def leave(name: str) -> None:
        with atomic_folder(tmp_path / name) as partial:
            os.link(tmp_path / "file", partial.with_name(partial.name.replace(name, f"{name}-file")))
            partial.rename(tmp_path / "aside")
            (tmp_path / "aside").rename(partial.with_name(partial.name.replace(name, f"{name}-folder")))
            raise KeyboardInterrupt

    (tmp_path / "file").touch()
    for name in ("one", "other"):
        with pytest.raises(KeyboardInterrupt):
            leave(name)
    remove_partials(tmp_path, "one")
    assert len(list(tmp_path.glob(".one*"))) == 0
    assert len(list(tmp_path.glob(".other*"))) == 2
    remove_partials(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("check", [check_writable, check_folder])
def test_missing_permission_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check: Callable[[str, Path], object]
) -> None:
    # Whoever runs the tests as root may write everywhere, so the system's answer is replaced.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(InputError, match="cannot be written"):
        check("--output", tmp_path / "output")


def test_a_file_that_may_not_be_changed_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "output").touch()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).is_dir())
    with pytest.raises(InputError, match="output cannot be written; permission is missing"):
        check_writable("--output", tmp_path / "output")


def test_a_folder_that_must_be_new_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_folder("--output", tmp_path, must_be_new=True) == tmp_path.resolve()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "is_mount", lambda path: path == tmp_path.resolve())
        with pytest.raises(InputError, match="cannot be replaced by the finished folder; name a new folder inside it"):
            check_folder("--output", tmp_path, must_be_new=True)
    (tmp_path / "file").touch()
    assert check_folder("--output", tmp_path) == tmp_path.resolve()
    with pytest.raises(InputError, match="exists already; name a new folder"):
        check_folder("--output", tmp_path, must_be_new=True)
    with pytest.raises(InputError, match=r"cannot be a folder, because .*file is a file"):
        check_folder("--output", tmp_path / "file" / "inside")


@pytest.mark.parametrize("folder", ["runs/demo", "runs/demo/", ".", "checkpoints/..", ".."])
def test_a_name_with_a_suffix_lies_beside_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    run = tmp_path / "runs" / "demo"
    (run / "checkpoints").mkdir(parents=True)
    monkeypatch.chdir(run / "checkpoints" if folder == ".." else tmp_path if "demo" in folder else run)
    assert beside(folder, "-onnx").resolve() == run.with_name("demo-onnx")
