"""The function that long work reports its progress to, so that the library never prints."""

from typing import Protocol


class Progress(Protocol):
    """A function that is called repeatedly during long work."""

    def __call__(self, stage: str, done: int, total: int | None = None) -> None:
        """Report progress.

        Args:
            stage: the current work, such as "packing the training text".
            done: the part of `total` that is done; without a total, the number of bytes of text done.
            total: the whole amount of work, if known.
        """


def no_progress(stage: str, done: int, total: int | None = None) -> None:
    """Ignore every report."""
