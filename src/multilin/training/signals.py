"""Ending a run politely: the first Ctrl-C or SIGTERM asks, the second one insists."""

import signal
import threading
from types import FrameType
from typing import Any

_ASKING = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Within this context SIGINT and SIGTERM are noted in `signal_number` instead of ending the program.

    A second signal acts as usual, for someone who cannot wait for the step and its checkpoint. Python delivers
    signals to the main thread alone; elsewhere nothing is changed.
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in _ASKING}
        return self

    def __exit__(self, *exception: object) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal_number = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
