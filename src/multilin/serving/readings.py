"""The weights with which the layers read the text of a turn, as in `multilin explain`, computed on demand."""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from multilin.errors import InputError, plural
from multilin.serving.errors import too_busy
from multilin.serving.turns import Turn

if TYPE_CHECKING:
    from multilin.runs.load import Run

MOST_TOKENS = 512  # at the end of a text; time and memory grow with the square of the number
MOST_WAITING = 8  # requests that may wait; each occupies a thread of the server
DIGITS = 4
Json = dict[str, Any]


class Readings:
    """The weights with which each token of a turn's text reads the tokens before it.

    The PyTorch model is loaded at the first request. Requests are answered one at a time. The weights of the last
    requested turn are kept, because clients request the steps of a turn one by one.

    Args:
        load: loads the model; None for an export, which cannot show weights.
    """

    def __init__(self, load: "Callable[[], Run] | None") -> None:
        self._load = load
        self._run: Run | None = None
        self._last: tuple[Json, list[NDArray[np.float32]]] | None = None
        self._lock, self._places = threading.Lock(), threading.BoundedSemaphore(MOST_WAITING)

    def get(self, turn: Turn, step: int) -> Json:
        """Compute, or wait for, the weights of the step with this index in `Explanation.steps`.

        Raises:
            ApiError: too many requests wait.
            InputError: the model has no weights to show, or no such step.
        """
        if self._load is None:
            raise InputError(
                "turn: an exported model cannot show the weights of its layers; serve the folder of the run"
            )
        if not self._places.acquire(blocking=False):
            raise too_busy()
        try:
            with self._lock:
                if self._last is None or self._last[0]["turn"] != turn.id:
                    self._last = self._explain(turn)
                about, weights = self._last
        finally:
            self._places.release()
        if step >= len(weights):
            raise InputError(f"step: {step} given, but this model has {plural(len(weights), 'step')}, counted from 0")
        rows = [
            np.round(row[: place + 1].astype(np.float64), DIGITS).tolist() for place, row in enumerate(weights[step])
        ]
        return about | {"step": step, "meaning": about["meanings"][step], "weights": rows}

    def _explain(self, turn: Turn) -> tuple[Json, list[NDArray[np.float32]]]:
        """Compute labels, texts, and each step's weights (characters, characters), averaged over the step's heads."""
        from multilin.analysis.explain.explanation import by_character, explain
        from multilin.data.tokenizers import start_token_id, whole_characters

        assert self._load is not None
        run = self._run = self._run or self._load()
        most = min(MOST_TOKENS, run.longest_text or MOST_TOKENS)
        ids, start = turn.token_ids, start_token_id(run.tokenizer)
        if ids[:1] == [start]:
            ids = ids[1:]
        num_left_out = max(0, len(ids) - (most - 1))
        ids = [start, *ids[num_left_out:]]
        steps = explain(run.model, ids, remove=False).steps
        if not steps:
            raise InputError("turn: this model has no readable attention weights")
        characters = whole_characters(run.tokenizer, ids)
        lengths = [num_tokens for num_tokens, _ in characters]
        about = {
            "object": "reading", "turn": turn.id, "num_left_out": turn.num_unknown + num_left_out,
            "characters": ["", *(text for _, text in characters[1:])],
            "steps": [step.label for step in steps], "meanings": [step.reading.meaning for step in steps],
        }  # fmt: skip
        ends = np.cumsum(lengths) - 1  # a character reads with the weights of its last token
        weights = (by_character(step.weights_HTS.mean(axis=0)[ends], lengths) for step in steps)
        return about, [rows.astype(np.float32) for rows in weights]
