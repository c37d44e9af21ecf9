"""Writes files and folders. Each is complete or absent, and never replaces a device, a pipe or a link.

Data is first written to a hidden file or folder beside the target, which is flushed to the disk and then renamed to
the target. Symbolic links are followed: the file to which a link leads is replaced.
"""

import contextlib
import hashlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from multilin.errors import InputError, shorten

LONGEST_NAME = 255  # bytes, on every common file system
MOST_LINKS = 40  # links followed in a row, as in Linux
LONGEST_PATH = 200  # characters of a path in a message
KERNEL_FOLDERS = ("/proc", "/sys")  # hold no regular files; /dev/stdout is a link into /proc


def check_writable(name: str, path: str | Path) -> Path:
    """Refuse a file that cannot be written, before any work is done.

    Args:
        name: the flag or field that gave the path; messages begin with it.
        path: where a file will be written.

    Returns:
        The path of the file; if `path` is a link, the path to which the link leads.

    Raises:
        InputError: the folder of the file does not exist or cannot be written, or `path` is not a regular file.
    """
    with path_errors(name, path):
        target = _resolve(name, path)
        mode = _mode(target)
        if mode is not None and not stat.S_ISREG(mode):
            raise InputError(f"{name}: {short_path(path)} is {file_kind(mode)}; give a file")
        if not target.parent.is_dir():
            raise InputError(f"{name}: the folder {short_path(Path(path).parent)} does not exist")
        if not os.access(target.parent, os.W_OK | os.X_OK):
            raise InputError(f"{name}: the folder {short_path(Path(path).parent)} cannot be written")
        if mode is not None and not os.access(target, os.W_OK):
            raise InputError(f"{name}: {short_path(path)} cannot be written; permission is missing")
    return target


def check_folder(name: str, path: str | Path, *, must_be_new: bool = False) -> Path:
    """Refuse a folder that cannot be written to, before any work is done.

    Args:
        name: the flag or field that gave the path; messages begin with it.
        path: the folder; it and its parents need not exist.
        must_be_new: refuse a folder that is not empty.

    Returns:
        The path of the folder; if `path` is a link, the path to which the link leads.

    Raises:
        InputError: the path or a parent is not a folder or cannot be written, or a folder that must be new holds files.
    """
    with path_errors(name, path):
        existing = target = _resolve(name, path)
        while (mode := _mode(existing)) is None:
            existing = existing.parent
        if not stat.S_ISDIR(mode):
            raise InputError(
                f"{name}: {short_path(path)} cannot be a folder, because {short_path(existing)} is {file_kind(mode)}"
            )
        if not os.access(existing, os.W_OK | os.X_OK):
            raise InputError(
                f"{name}: {short_path(path)} cannot be written; permission is missing for {short_path(existing)}"
            )
        if must_be_new and existing == target:
            if any(target.iterdir()):
                raise InputError(f"{name}: {short_path(path)} exists already; name a new folder")
            if target.is_mount() or not os.access(target.parent, os.W_OK | os.X_OK):
                raise InputError(
                    f"{name}: {short_path(path)} cannot be replaced by the finished folder; name a new folder inside it"
                )
    return target


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write a file, text as UTF-8; see `atomic_file`."""
    with atomic_file(path) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def atomic_file(path: str | Path) -> Iterator[Path]:
    """Context that yields a temporary path for a file, which is renamed to `path` at the end, or removed on failure.

    The new file has the permissions of the file that it replaces, or the default permissions if it replaces none.

    Raises:
        InputError: see `check_writable`.
        OSError: the target cannot be written, for example because the disk is full.
    """
    target = check_writable("output", path)
    partial = partial_path(target)
    try:
        with _errors_about(path, partial):
            partial.touch()
            mode = (target if target.exists() else partial).stat().st_mode
            yield partial
            partial.chmod(stat.S_IMODE(mode))  # safetensors makes files that only their owner may read
            _flush_to_disk(partial)
            partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_folder(path: str | Path, partial: Path | None = None) -> Iterator[Path]:
    """Context that yields an empty folder, which is renamed to `path` at the end, or removed on failure.

    Args:
        path: the final path of the folder; an existing folder is replaced as a whole.
        partial: path of the yielded folder, if other processes need to know the path; see `partial_path`.

    Raises:
        InputError: see `check_folder`.
        OSError: the target cannot be written, for example because the disk is full.
    """
    target = check_folder("output", path)
    partial = partial or partial_path(target)
    try:
        with _errors_about(path, partial):
            partial.mkdir(parents=True)
            yield partial
            files = [file for file in partial.rglob("*") if file.is_file()]
            for file in files:  # safetensors makes files that only their owner may read
                file.chmod(file.stat().st_mode | (partial.stat().st_mode & 0o666))
            _flush_to_disk(*files, partial)
            if target.exists():
                replaced = partial_path(target)
                target.rename(replaced)
                partial.rename(target)
                shutil.rmtree(replaced)
            else:
                partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def atomic_files(folder: Path) -> Iterator[Path]:
    """Context that yields an empty folder, whose files move into `folder` at the end, each complete or not at all."""
    partial = partial_path(folder / "files")
    try:
        with _errors_about(folder, partial):
            partial.mkdir()
            yield partial
            for file in sorted(partial.iterdir()):
                with atomic_file(folder / file.name) as moved:
                    shutil.move(file, moved)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def beside(folder: str | Path, suffix: str) -> Path:
    """The path of a folder with a suffix added to the folder's name, even for a folder given as `.` or `..`."""
    folder = Path(folder)
    named = folder if folder.name not in ("", "..") else folder.resolve()
    return named.parent / f"{named.name}{suffix}"


def short_path(path: str | Path) -> str:
    """A path in a message, cut in its middle if it is long."""
    return shorten(str(path), LONGEST_PATH)


def checksum(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def partial_path(target: Path, token: str | None = None) -> Path:
    """The hidden path to which a file or folder is first written; `token` replaces the random part of this path."""
    return target.with_name(f".{target.name[:40]}-{token or secrets.token_hex(4)}.partial")


def remove_partials(folder: Path, name: str = "*") -> None:
    """Remove unfinished files of killed processes in a folder, for one target or all; the caller holds a lock."""
    for partial in folder.glob(f".{name}-*.partial"):
        shutil.rmtree(partial) if partial.is_dir() else partial.unlink()


def is_path(name: str) -> bool:
    """True if a name can only be a file or folder, because names of this form are not used on the hub."""
    path = Path(name)
    is_file = path.suffix == ".json" or (path.suffix != "" and "/" not in name)
    return is_file or path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1


def _resolve(name: str, path: str | Path) -> Path:
    """The path with links followed one at a time, so that a link into /proc or /sys is refused, not resolved."""
    if not str(path) or "\0" in str(path):
        raise InputError(f"{name}: {str(path)!r} given, but it should be the path of a file or folder")
    target = Path(path)
    for _ in range(MOST_LINKS):
        target = Path(os.path.realpath(target.parent)) / target.name
        if any(target.is_relative_to(folder) for folder in KERNEL_FOLDERS):
            raise InputError(f"{name}: {short_path(path)} belongs to the system; give a path in another folder")
        if not target.is_symlink():
            break
        target = target.parent / target.readlink()
    target = Path(os.path.realpath(target))
    if longest := next((part for part in target.parts if len(os.fsencode(part)) > LONGEST_NAME), None):
        size = len(os.fsencode(longest))
        raise InputError(
            f"{name}: {short_path(path)} has a name of {size} bytes, but at most {LONGEST_NAME} are possible"
        )
    return target


def _mode(path: Path) -> int | None:
    """Kind and permissions of the file at a path; None if there is no file."""
    try:
        return path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None


def file_kind(mode: int) -> str:
    """The kind of a file in words, for a message, from the mode that `os.stat` or `os.lstat` gives."""
    kinds = {stat.S_ISREG: "a file", stat.S_ISDIR: "a folder", stat.S_ISLNK: "a link that leads nowhere",
             stat.S_ISFIFO: "a pipe", stat.S_ISSOCK: "a socket"}  # fmt: skip
    return next((kind for is_kind, kind in kinds.items() if is_kind(mode)), "a device")


@contextlib.contextmanager
def path_errors(name: str, path: str | Path) -> Iterator[None]:
    """Context that turns a system error about a path into an InputError of one sentence that names the field."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{name}: {short_path(path)} cannot be written ({error.strerror})") from None


@contextlib.contextmanager
def _errors_about(path: str | Path, partial: Path) -> Iterator[None]:
    """Context in which write errors name the file or folder that the user knows, not the hidden temporary path."""
    try:
        yield
    except ConnectionError:
        raise
    except OSError as error:
        if error.errno is None or not (error.filename is None or str(error.filename).startswith(str(partial))):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    except Exception as error:
        # safetensors and tokenizers report a failed write, such as a full disk, by other exceptions.
        number = re.search(r"os error (\d+)", str(error)) if type(error) in (Exception, SafetensorError) else None
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def _flush_to_disk(*paths: Path) -> None:
    # A rename may reach the disk before the data it names; a power cut would then leave a damaged file.
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
