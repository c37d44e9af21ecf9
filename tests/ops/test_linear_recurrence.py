"""linear_recurrence: every backend against the definition in float64, and laws of the recurrence."""

import functools
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from multilin.errors import InputError
from multilin.ops import linear_recurrence as unchecked
from multilin.ops.kernels import why_no_numba
from multilin.ops.linear_recurrence import (
    LINEAR_RECURRENCE,
    LinearRecurrenceState,
    linear_recurrence_weights,
    operator,
    portable,
    reference,
)
from tests.ops.cases.linear_recurrence import GATES, SHAPES, make_inputs
from tests.ops.checked import linear_recurrence
from tests.ops.comparing import check_near, with_gradients

pytestmark = pytest.mark.usefixtures("poisoned")
needs_numba = pytest.mark.skipif(why_no_numba() is not None, reason=str(why_no_numba()))
cpu = partial(operator.linear_recurrence, "cpu")
BACKENDS = [pytest.param(cpu, marks=needs_numba, id="cpu"), portable.linear_recurrence]


def test_the_definition_is_the_paper_s() -> None:
    inputs, before, starts = make_inputs("random", "odd sizes")
    hidden, state = linear_recurrence(inputs, state=LinearRecurrenceState(before), starts=starts)
    for row, channel in ((0, 3), (1, 12)):
        h = float(before[row, channel])
        for t, (k, u) in enumerate(inputs[row, :, :, channel].tolist()):
            z = 1 / (1 + math.exp(-k))
            g = u + 0.5 if u >= 0 else 1 / (1 + math.exp(-u))
            h = (1 - z) * (0.0 if starts[row, t] else h) + z * g
            assert math.isclose(hidden[row, t, channel], h, rel_tol=1e-12)
        assert state.hidden_BD[row, channel] == hidden[row, -1, channel]


@pytest.mark.parametrize("backend", [portable.linear_recurrence])
@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("shape", SHAPES)
def test_backends_equal_the_definition_in_float64(backend: Any, gates: str, shape: str) -> None:
    *inputs, starts = make_inputs(gates, shape)
    ways = (lambda *x, compute=compute: compute(*x, starts) for compute in (backend, reference.linear_recurrence))
    torch.testing.assert_close(*(with_gradients(way, inputs) for way in ways), rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-3)], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("shape", SHAPES)
def test_precision_against_float64(shape, gates, backend, dtype, tolerance) -> None:
    inputs, before, starts = make_inputs(gates, shape)
    inputs, before = inputs.to(dtype), before.float()
    found = with_gradients(lambda *x: backend(*x, starts), (inputs, before))
    exact = with_gradients(lambda *x: reference.linear_recurrence(*x, starts), (inputs, before), torch.float64)
    assert [x.dtype for x in found] == [dtype, torch.float32] * 2
    check_near(found, exact, tolerance)


@functools.cache
def long_text() -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, h before them, and the hidden states in float64, which take seconds."""
    inputs = torch.randn(1, 100_000, 2, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    inputs[:, :, 0] -= torch.linspace(0, 8, 16)  # channels that remember a few tokens, or thousands
    inputs, before = inputs.float(), torch.zeros(1, 16)
    return inputs, before, reference.linear_recurrence(inputs.double(), before.double(), None)[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_hundred_thousand_tokens_lose_no_digits(backend: Any) -> None:
    inputs, before, exact = long_text()
    result, after = backend(inputs, before, None)
    error = (result - exact).norm(dim=1) / exact.norm(dim=1)
    assert error.max() <= 1e-5
    assert after.shape == (1, 16)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gate_that_is_nearly_shut_at_every_token_loses_no_digits(backend: Any) -> None:
    """Rounding 1 - z alike at every token would be as if z were another, here by a 200th of a per cent."""
    inputs = torch.randn(1, 32_768, 2, 4, generator=torch.Generator().manual_seed(0))
    inputs[:, :, 0] = -8
    before = torch.zeros(1, 4)
    ways = (lambda *x, compute=compute: compute(*x, None) for compute in (backend, reference.linear_recurrence))
    found, exact = map(with_gradients, ways, [(inputs, before)] * 2, [torch.float32, torch.float64])
    check_near(found, exact, 5e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_reading_in_pieces_is_reading_at_once_and_padding_is_inert(dtype: torch.dtype) -> None:
    inputs, _, starts = make_inputs("random", "odd sizes", dtype=dtype)
    whole, after = linear_recurrence(inputs, starts=starts)
    padding = torch.zeros_like(starts)
    padding[:, [0, 5, 6, 40]] = True
    state, pieces = None, []
    for piece in (slice(0, 1), slice(1, 40), slice(40, 67)):
        hidden, state = linear_recurrence(inputs[:, piece], state=state, starts=starts[:, piece])
        pieces.append(hidden)
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole)
    torch.testing.assert_close(state, after)
    assert linear_recurrence(inputs, needs_state=False)[1] is None
    padded, _ = linear_recurrence(inputs, padding=padding)
    for row in range(2):
        alone, _ = linear_recurrence(inputs[row : row + 1][:, ~padding[row]])
        torch.testing.assert_close(padded[row : row + 1][:, ~padding[row]], alone)


def test_weights_applied_to_the_candidates_are_the_hidden_states() -> None:
    inputs, _, starts = make_inputs("some shut", "odd sizes")
    inputs, padding = inputs[..., :1], torch.zeros_like(starts)
    padding[0, 20:25] = True
    hidden, _ = linear_recurrence(inputs, starts=starts, padding=padding)
    weights_BTS, null_BT = linear_recurrence_weights(inputs, starts=starts, padding=padding)
    candidates = reference.make_positive(inputs[:, :, 1])
    torch.testing.assert_close(weights_BTS @ candidates, hidden, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(weights_BTS.sum(dim=2) + null_BT, torch.ones(2, 67, dtype=torch.float64))


@needs_numba
def test_the_operator_keeps_the_contract_of_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    inputs, before, starts = make_inputs("random", "odd sizes", dtype=torch.float32)
    for given in (None, starts):
        arguments = ("cpu", inputs.requires_grad_(), before.requires_grad_(), given)
        torch.library.opcheck(torch.ops.multilin.linear_recurrence.default, arguments)


@needs_numba
def test_the_kernels_are_chosen_on_a_cpu() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert "numba" in LINEAR_RECURRENCE.backend_for(torch.device("cpu"), dtype).name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nan_is_seen(dtype: torch.dtype) -> None:
    """A loss that is not finite stops a run; a finite one from NaN would not."""
    for row in (0, 1):  # the gate and the candidate
        inputs = torch.zeros(1, 5, 2, 3, dtype=dtype)
        inputs[0, 2, row] = torch.nan
        hidden, state = unchecked.linear_recurrence(inputs)
        assert hidden[0, :2].isfinite().all()
        assert hidden[0, 2:].isnan().all()
        assert state.hidden_BD.isnan().all()


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"inputs": torch.zeros(2, 3, 4)}, r"inputs: shape \(2, 3, 4\) given"),
        ({"state": LinearRecurrenceState(torch.ones(1, 8))}, r"state: shape \(1, 8\) given, but it must be \(4, 8\)"),
        ({"starts": torch.zeros(1, 20, dtype=torch.bool)}, r"starts: shape \(1, 20\) given, but it must be \(4, 20\)"),
    ],
)
def test_shapes_that_do_not_fit_are_named(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        unchecked.linear_recurrence(**{"inputs": torch.zeros(4, 20, 2, 8), **fields})
