"""The comparison of an exported model with the original: their logits, size, score and speed."""

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy

from multilin.data.packed_text import PackedText
from multilin.data.tokenizers import token_byte_lengths
from multilin.errors import InputError, as_input_error
from multilin.inference.engine import Engine
from multilin.inference.onnx_engine import OnnxEngine
from multilin.inference.sampling import Logits
from multilin.inference.torch_engine import TorchEngine
from multilin.model import MultilinForCausalLM
from multilin.model.memory import parameter_bytes
from multilin.runs.load import Run

NUM_ROWS, NUM_TOKENS = 16, 256  # of the validation text
NUM_GREEDY = 200
TOLERANCES = {"float32": 1e-3, "8bit": 0.1, "4bit": 0.5}
"""Largest relative difference of logits by precision, see `check_export`.

In measurements, models with random weights differed by at most 1e-6, 0.063 and 0.27, trained models by less.
"""
LONGEST, SHORTEST, SHORT = 4096, 512, 200  # tokens of random texts
PIECES = (0, 1, 2, 3, 5, 17, 64, 65, 150)  # tokens read at once


@torch.inference_mode()
def check_export(model: MultilinForCausalLM, folder: Path) -> None:
    """Compare the logits of an export with the model's logits, and raise InputError if they differ too much.

    The export reads random texts in pieces of random lengths, one text alone and three together; PyTorch reads each
    text at once. The root mean square of the differences of the logits after all pieces is divided by the standard
    deviation of the logits. The first text is long enough to fill every window twice, within `LONGEST` tokens.

    Args:
        model: the original, in float32 on the CPU.
        folder: the export.

    Raises:
        InputError: this quotient is above the tolerance of the export's precision, or the graphs cannot be run.
    """
    engine = OnnxEngine(folder, spins=False)
    precision, limit = engine.manifest.precision, min(engine.longest_text or LONGEST, LONGEST)
    windows = [about.shape[0] for about in engine.manifest.state if about.is_ring]
    for num_rows, length in ((1, max(SHORTEST, 2 * max(windows, default=0))), (3, SHORT)):
        ids = np.random.default_rng(0).integers(0, engine.vocab_size, (num_rows, min(length, limit)))
        hidden = model.model(torch.from_numpy(ids), use_cache=False, return_dict=True)[0]
        with as_input_error(lambda reason: f"run: the exported graphs cannot be run ({reason})"):
            difference = _difference(model, hidden, engine, ids)
        if difference <= TOLERANCES[precision]:  # nan is not
            continue
        allowed = f"of their standard deviation, but {precision} allows {TOLERANCES[precision]:.1%}"
        own = _difference(model, hidden, TorchEngine(model), ids)
        if not own <= TOLERANCES["float32"]:
            raise InputError(
                f"run: a layer does not continue from its state: the logits of a text read in pieces differ by "
                f"{own:.1%} {allowed}"
            )
        raise InputError(
            f"run: the logits of the exported graphs and of the model differ by {difference:.1%} {allowed}"
        )


def _difference(model: MultilinForCausalLM, hidden_BTD: torch.Tensor, engine: Engine, ids: NDArray[np.int64]) -> float:
    """The relative difference between an engine's logits and the model's logits at `hidden_BTD`."""
    rows, columns, given = zip(*_read_in_pieces(engine, ids), strict=True)
    given_NV = torch.from_numpy(np.stack(given)).double()
    expected_NV = model.lm_head(hidden_BTD[list(rows), list(columns)]).double()
    variance = expected_NV.var(-1, correction=0).mean().clamp(min=1e-12)
    return float(((given_NV - expected_NV).square().mean() / variance).sqrt())


def _read_in_pieces(engine: Engine, ids: NDArray[np.int64]) -> Iterator[tuple[int, int, Logits]]:
    """Read rows in random pieces, often of one token; yield the row, the column and the logits at each piece's end."""
    draw, state, num_read = np.random.default_rng(1), engine.new_state(len(ids)), np.zeros(len(ids), np.int64)
    while (num_read < ids.shape[1]).any():
        counts = np.ones_like(num_read) if draw.random() < 0.5 else draw.choice(PIECES, len(ids))
        ends = np.minimum(num_read + counts, ids.shape[1])
        is_read = ends > num_read
        if not is_read.any():
            continue
        logits = engine.read(state, [row[a:b].tolist() for row, a, b in zip(ids, num_read, ends, strict=True)])
        num_read = ends
        yield from ((row, int(ends[row]) - 1, logits[row]) for row in np.flatnonzero(is_read).tolist())


@dataclass(frozen=True)
class Comparison:
    """The result of `compare_export`; pairs are (original, export).

    largest_difference: largest absolute difference of logits on the text; largest_logit: largest absolute logit.
    equal_tokens: number of greedy tokens, out of `num_greedy`, before the first token that differs.
    bits_per_byte: score on `num_tokens` tokens of the text.
    num_bytes: bytes of the weights in memory, and of the exported files.
    tokens_per_second: speed of greedy generation of one sequence.
    """

    largest_difference: float
    largest_logit: float
    equal_tokens: int
    num_greedy: int
    bits_per_byte: tuple[float, float]
    num_tokens: int
    num_bytes: tuple[int, int]
    tokens_per_second: tuple[float, float]


def compare_export(run: Run, folder: Path, text: PackedText) -> Comparison:
    """Measure the difference, the size and the speed of a model and its export on the same tokens.

    Args:
        run: the original, on the CPU.
        folder: the export.
        text: a text that was packed with the model's tokenizer.

    Raises:
        InputError: the text has fewer than two tokens.
    """
    original, exported = TorchEngine(run.model), OnnxEngine(folder)
    ids = _rows(text, original.longest_text)
    with torch.inference_mode():
        expected = run.model(torch.from_numpy(ids[:, :-1])).logits.float().numpy()
    given = _read_columns(exported, ids[:, :-1])
    lengths = np.array(token_byte_lengths(run.tokenizer))[ids[:, 1:]]
    room = min(NUM_GREEDY, original.longest_text or NUM_GREEDY)
    start = [int(ids[0, 0])]
    first, seconds = _greedy(original, start, room)
    second, exported_seconds = _greedy(exported, start, room)
    is_equal = np.array(first) == np.array(second)
    return Comparison(
        largest_difference=float(np.abs(given - expected).max()),
        largest_logit=float(np.abs(expected).max()),
        equal_tokens=room if is_equal.all() else int(is_equal.argmin()),
        num_greedy=room,
        bits_per_byte=(_bits_per_byte(expected, ids, lengths), _bits_per_byte(given, ids, lengths)),
        num_tokens=ids[:, 1:].size,
        num_bytes=(parameter_bytes(run.model), sum(path.stat().st_size for path in folder.iterdir())),
        tokens_per_second=(1 / seconds, 1 / exported_seconds),
    )


def _rows(text: PackedText, longest: int | None) -> NDArray[np.int64]:
    """Take rows of tokens from the text, as long as the text and the model allow."""
    if text.num_tokens < 2:
        raise InputError("the validation text has fewer than two tokens")
    length = min(NUM_TOKENS, longest or NUM_TOKENS, text.num_tokens - 1) + 1
    num_rows = min(NUM_ROWS, text.num_tokens // length)
    return np.array(text.tokens[: num_rows * length], np.int64).reshape(num_rows, -1)


def _read_columns(engine: Engine, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    """Logits after every token, (rows, T, V)."""
    state = engine.new_state(len(ids))
    columns = [engine.read(state, ids[:, [column]].tolist()) for column in range(ids.shape[1])]
    return np.stack(columns, axis=1)


def _bits_per_byte(logits: NDArray[np.float32], ids: NDArray[np.int64], lengths: NDArray[np.int64]) -> float:
    """Bits per byte of all tokens that have text; tokens that begin documents are left out."""
    logits_NV, targets_N = torch.from_numpy(logits).double().flatten(0, 1), torch.from_numpy(ids[:, 1:]).flatten()
    nats_N = cross_entropy(logits_NV, targets_N, reduction="none").numpy()
    return float(nats_N[lengths.ravel() > 0].sum() / np.log(2) / max(int(lengths.sum()), 1))


def _greedy(engine: Engine, start: list[int], num_tokens: int) -> tuple[list[int], float]:
    """Generate greedily: the tokens, and the median of the seconds for one token."""
    state, ids, chosen, seconds = engine.new_state(), start, list[int](), list[float]()
    for _ in range(num_tokens):
        begin = time.perf_counter()
        ids = [int(engine.read(state, [ids])[0].argmax())]
        seconds.append(time.perf_counter() - begin)
        chosen += ids
    return chosen, statistics.median(seconds)
