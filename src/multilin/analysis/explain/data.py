"""An explanation as plain data: in full for JSON, and packed for the page."""

import base64
import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multilin.analysis.explain.explanation import Explanation, Step
from multilin.analysis.explain.run import Report
from multilin.analysis.explain.words import MEANINGS, what_is_shown

DIGITS = 7


def as_json(report: Report) -> str:
    """Everything, every number beside its meaning.

    Weights and effects are given in rows, one per position: {"first": s, "values": [...]} holds those of tokens s,
    s + 1 and so on, and nothing is read or changed outside a row.
    """
    found = report.explanation
    content = {
        "run": report.run,
        "source": report.source,
        "finding": what_is_shown(found),
        "meaning": MEANINGS,
        "tokens": _tokens(report),
        "characters": _characters(report),
        "steps": [_step(step) for step in found.steps],
        "removal": _removal(found),
    }
    return json.dumps(content, ensure_ascii=False, allow_nan=False)


def page_data(report: Report) -> dict[str, Any]:
    """The same for the page: matrices as base64 of little-endian float32, the rows of all heads end to end."""
    found = report.explanation
    num_tokens = len(report.tokens)
    removal = found.removal and {
        "divergence": _packed(found.removal.divergence_TS[None], 0, num_tokens),
        "loss_change": _packed(found.removal.loss_change_TS[None], 0, num_tokens),
    }
    return {
        "meaning": MEANINGS,
        "tokens": _tokens(report),
        "characters": _characters(report),
        "steps": [_packed_step(step) for step in found.steps],
        "removal": removal,
    }


def rows(
    weights_TS: NDArray[np.float64], nearest: int, farthest: int | None
) -> Iterator[tuple[int, NDArray[np.float64]]]:
    """Of each position the first token it reads, and the weights from there on."""
    for place, weights_S in enumerate(weights_TS):
        first = max(0, 0 if farthest is None else place - farthest)
        yield first, weights_S[first : place - nearest + 1]


def _tokens(report: Report) -> list[dict[str, Any]]:
    found = report.explanation
    losses = [*map(_rounded, found.losses.tolist()), None]
    return [
        {
            "id": token_id,
            "text": text,
            "loss_of_next": loss,
            "guesses": [{"id": index, "text": report.texts[index], "probability": _rounded(p)} for index, p in guesses],
        }
        for token_id, text, loss, guesses in zip(found.token_ids, report.tokens, losses, found.guesses, strict=True)
    ]


def _characters(report: Report) -> list[dict[str, Any]]:
    """The runs of tokens that are whole characters: the first token, how many there are, and their text."""
    starts = np.cumsum([0, *(num_tokens for num_tokens, _ in report.characters)]).tolist()
    return [
        {"first": first, "tokens": num_tokens, "text": text}
        for first, (num_tokens, text) in zip(starts, report.characters, strict=False)
    ]


def _step(step: Step) -> dict[str, Any]:
    reading = step.reading
    heads = [
        {
            "rows": _as_rows(weights_TS, reading.nearest, reading.farthest),
            "own": None if reading.own_BHT is None else _list(reading.own_BHT[0, head].numpy()),
            "null": None if reading.null_BHT is None else _list(reading.null_BHT[0, head].numpy()),
        }
        for head, weights_TS in enumerate(step.weights_HTS)
    ]
    return _about(step) | {"heads": heads}


def _packed_step(step: Step) -> dict[str, Any]:
    reading = step.reading
    farthest = len(step.weights_HTS[0]) if reading.farthest is None else reading.farthest
    return _about(step) | {
        "num_heads": len(step.weights_HTS),
        "farthest": farthest,
        "weights": _packed(step.weights_HTS, reading.nearest, farthest),
        "own": None if reading.own_BHT is None else _base64(reading.own_BHT[0].numpy()),
        "null": None if reading.null_BHT is None else _base64(reading.null_BHT[0].numpy()),
    }


def _about(step: Step) -> dict[str, Any]:
    reading = step.reading
    return {
        "layer": step.layer,
        "step": step.name,
        "label": step.label,
        "meaning": reading.meaning,
        "is_share": reading.is_share,
        "nearest": reading.nearest,
        "farthest": reading.farthest,
        "agreements": [asdict(found) for found in step.agreements],
    }


def _removal(found: Explanation) -> dict[str, Any] | None:
    if found.removal is None:
        return None
    return {
        "divergence": _as_rows(found.removal.divergence_TS, 0, None),
        "loss_change": _as_rows(found.removal.loss_change_TS, 0, None),
    }


def _as_rows(values_TS: NDArray[np.float64], nearest: int, farthest: int | None) -> list[dict[str, Any]]:
    return [{"first": first, "values": _list(values_S)} for first, values_S in rows(values_TS, nearest, farthest)]


def _packed(values_HTS: NDArray[np.float64], nearest: int, farthest: int) -> str:
    return _base64(np.concatenate([row for values_TS in values_HTS for _, row in rows(values_TS, nearest, farthest)]))


def _base64(values: NDArray[np.float64]) -> str:
    return base64.b64encode(values.astype("<f4").tobytes()).decode("ascii")


def _list(values: NDArray[np.float64]) -> list[float | None]:
    return [_rounded(value) for value in values.tolist()]


def _rounded(value: float) -> float | None:
    """None stands for what cannot be measured."""
    return None if value != value else float(f"{value:.{DIGITS}g}")
