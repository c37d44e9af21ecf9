"""The function that long work reports its progress to, so that the library never prints."""

from typing import Protocol


class Progress(Protocol):
    """A function that long work calls now and then."""

    def __call__(self, stage: str, done: int, total: int | None = None) -> None:
        """Report progress.

        Args:
            stage: the work under way, such as "packing the training text".
            done: how much of `total` is done; without a total, bytes of text.
            total: how much there is to do, if that is known.
        """


def no_progress(stage: str, done: int, total: int | None = None) -> None:
    """Ignore every report."""
