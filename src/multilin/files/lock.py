"""A lock on a folder, so that two processes never write into the same folder."""

import contextlib
import errno
import json
import os
import socket
import warnings
from collections.abc import Iterator
from pathlib import Path

from multilin.errors import InputError
from multilin.files import check_folder, path_errors, short_path

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]

LOCK_FILE = ".multilin.lock"


@contextlib.contextmanager
def locked_folder(name: str, path: str | Path, *, waits: bool = False) -> Iterator[None]:
    """Lock a folder against other processes; if the folder does not exist, it is created.

    The operating system holds the lock on a hidden file, and releases the lock when this process ends in any way. A
    folder that was created here and is empty at the end is removed.

    Args:
        name: the flag or field that gave the path; messages begin with it.
        path: the folder.
        waits: whether to wait until no other process holds the lock.

    Raises:
        InputError: the folder cannot be written; or `waits` is False, and another process holds the lock. The message
            names the process that holds the lock.
    """
    folder = check_folder(name, path)
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    try:
        with path_errors(name, path):
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = _acquire(name, path, folder / LOCK_FILE, waits)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                (folder / LOCK_FILE).unlink(missing_ok=True)
            os.close(descriptor)
    finally:
        for made in missing:
            with contextlib.suppress(OSError):
                made.rmdir()


def _acquire(name: str, path: str | Path, lock: Path, waits: bool) -> int:
    """Lock and open the lock file, write the name of this process into it, and return the file descriptor."""
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
        try:
            if fcntl is None:
                raise OSError(errno.ENOSYS, "this system has no file locks")
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            holder = _holder(descriptor)
            os.close(descriptor)
            raise InputError(
                f"{name}: {short_path(path)} is in use by {holder}; wait until it has ended, or give another folder"
            ) from None
        except OSError as error:
            warnings.warn(
                f"{short_path(path)} cannot be locked ({error.strerror}): make sure that no other process writes to it",
                stacklevel=4,
            )
            return descriptor
        # The previous holder may have removed the file; then no other process can find the file of this lock.
        if os.fstat(descriptor).st_nlink:
            os.truncate(descriptor, 0)
            with contextlib.suppress(OSError):  # if the disk is full, the file names no process
                os.write(descriptor, json.dumps({"process": os.getpid(), "host": socket.gethostname()}).encode())
            return descriptor
        os.close(descriptor)


def _holder(descriptor: int) -> str:
    try:
        holder = json.loads(os.read(descriptor, 1000))
        return f"process {int(holder['process'])} on {str(holder['host'])!r}"
    except (OSError, ValueError, TypeError, KeyError):  # the holder has not written its process id yet
        return "another process"
