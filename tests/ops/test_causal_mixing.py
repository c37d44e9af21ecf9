"""causal_mixing: both paths against the equation, the state, padding, and the triangle that is learned."""

from functools import partial

import pytest
import torch

from multilin.errors import InputError
from multilin.ops.causal_mixing import CAUSAL_MIXING, lower_triangle, portable
from multilin.ops.causal_mixing import causal_mixing as unchecked
from multilin.ops.causal_mixing.portable import rows
from tests.ops.cases.causal_mixing import SHAPES, make_inputs
from tests.ops.checked import causal_mixing
from tests.ops.comparing import with_gradients

EXACT = {"rtol": 1e-11, "atol": 1e-11}


def equation(x: torch.Tensor, triangle: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    first = [t * (t + 1) // 2 for t in range(x.shape[1])]
    sums = [sum(triangle[first[t] + j] * x[:, j] for j in range(t + 1)) + bias[t] for t in range(x.shape[1])]
    return torch.stack(sums, dim=1)


@pytest.mark.parametrize("backend", CAUSAL_MIXING.backends, ids=lambda backend: backend.name)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("block", [5, portable.BLOCK])
def test_result_and_gradients_are_those_of_the_equation(name: str, backend, block: int, monkeypatch) -> None:
    monkeypatch.setattr(CAUSAL_MIXING, "backends", [backend])
    monkeypatch.setattr(portable, "BLOCK", block)
    found = with_gradients(partial(causal_mixing, needs_state=False), make_inputs(name))
    torch.testing.assert_close(found, with_gradients(equation, make_inputs(name)), **EXACT)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("cut", [1, 5, 6])
def test_reading_on_from_the_state_is_reading_at_once(name: str, cut: int) -> None:
    x, triangle, bias = make_inputs(name)
    whole, end = causal_mixing(x, triangle, bias)
    first, state = causal_mixing(x[:, :cut], triangle, bias)
    assert state is not None
    assert end is not None
    assert state.inputs_BND.shape == end.inputs_BND.shape == (len(x), len(bias), x.shape[2])
    if cut < x.shape[1]:
        rest, state = causal_mixing(x[:, cut:], triangle, bias, state=state)
        torch.testing.assert_close(torch.cat([first, rest], dim=1), whole, **EXACT)
        torch.testing.assert_close(state, end)
    assert end.num_read_B.tolist() == [x.shape[1]] * len(x)
    assert causal_mixing(x, triangle, needs_state=False)[1] is None


@pytest.mark.parametrize("cuts", [[1] * 7, [6, 1], [2, 5]])
def test_gradients_through_the_state_are_those_of_the_equation(cuts: list[int]) -> None:
    def in_pieces(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        state, parts = None, []
        for part in x.split(cuts, dim=1):
            y, state = causal_mixing(part, *weights, state=state)
            parts.append(y)
        return torch.cat(parts, dim=1)

    found, exact = (with_gradients(compute, make_inputs("few of many")) for compute in (in_pieces, equation))
    torch.testing.assert_close(found, exact, **EXACT)


@pytest.mark.parametrize("num_time", [1, 2, 5, 13])
def test_single_rows_are_those_of_the_matrix(num_time: int) -> None:
    triangle = torch.arange(1.0, 1 + 13 * 14 / 2)
    positions = torch.arange(13 - num_time, 13)[None].expand(2, -1)
    torch.testing.assert_close(rows(triangle, positions, 13), lower_triangle(triangle)[positions], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["whole context", "few of many"])
def test_padding_has_no_effect_whatever_it_holds(name: str) -> None:
    x, triangle, bias = make_inputs(name)
    padding = torch.zeros(x.shape[:2], dtype=torch.bool)
    padding[0, :3] = True
    filled = torch.where(padding[..., None], torch.inf, x)
    y, state = causal_mixing(filled, triangle, bias, padding=padding)
    alone, end = causal_mixing(x[:1, 3:], triangle, bias)
    torch.testing.assert_close(y[:1, 3:], alone, **EXACT)
    assert state is not None
    assert end is not None
    torch.testing.assert_close(state.inputs_BND[:1], end.inputs_BND, **EXACT)
    assert state.num_read_B.tolist()[0] == x.shape[1] - 3


def test_precision() -> None:
    exact, _ = causal_mixing(*make_inputs("whole context"))
    x, triangle, bias = (tensor.float() for tensor in make_inputs("whole context"))
    rounded, state = causal_mixing(x, triangle, bias)
    assert (rounded.double() - exact).norm() <= 1e-6 * exact.norm()
    low, state = causal_mixing(x.bfloat16(), triangle.bfloat16(), bias.bfloat16())
    assert state is not None
    assert low.dtype == torch.bfloat16
    assert state.inputs_BND.dtype == torch.float32


def test_under_autocast_it_is_a_bf16_product() -> None:
    x, triangle, bias = make_inputs("whole context")
    results = []
    for dtype, autocast in ((torch.float64, False), (torch.float32, True)):
        inputs = [tensor.to(dtype).requires_grad_() for tensor in (x, triangle, bias)]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            result, state = causal_mixing(*inputs)
        results.append([result, *torch.autograd.grad(result.square().sum(), inputs)])
        assert state is not None
        assert state.inputs_BND.dtype == dtype
    for exact, low in zip(*results, strict=True):
        assert 1e-5 * exact.norm() < (low - exact).norm() < 4e-3 * exact.norm()


def test_the_triangle_is_filled_row_by_row() -> None:
    parameters = torch.arange(1.0, 7.0, requires_grad=True)
    matrix = lower_triangle(parameters)
    assert matrix.tolist() == [[1, 0, 0], [2, 3, 0], [4, 5, 6]]
    matrix.sum().backward()
    assert parameters.grad is not None
    assert parameters.grad.tolist() == [1.0] * 6


def test_mistakes_are_named() -> None:
    x = torch.zeros(1, 3, 2)
    for wrong in (torch.zeros(5), torch.zeros(3, 3)):
        with pytest.raises(InputError, match="for a triangle of n rows"):
            unchecked(x, wrong)
    with pytest.raises(InputError, match="3 positions, but there are weights for 2"):
        unchecked(x, torch.zeros(3))
    _, state = unchecked(x, torch.zeros(6))
    with pytest.raises(InputError, match="4 positions"):
        unchecked(x[:, :1], torch.zeros(6), state=state)
    with pytest.raises(InputError, match="for a triangle of n rows"):
        lower_triangle(torch.zeros(5))
