"""int8: the laws of rounding, products exact in integers, every backend against the equation, straight-through."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from multilin.errors import InputError
from multilin.ops import int8
from multilin.ops.int8 import cpu, portable, reference
from multilin.ops.int8.products import Int8BlockOuter
from multilin.ops.kernels import why_no_numba
from tests.ops.cases.block_outer import SHAPES as OUTER_SHAPES
from tests.ops.cases.block_outer import make_inputs as outer_inputs
from tests.ops.cases.int8 import SHAPES, make_inputs
from tests.ops.checked import int8_block_outer, int8_linear, quantize
from tests.ops.comparing import check_near, with_gradients

STEPS = [
    pytest.param(portable.PortableSteps, id="portable"),
    pytest.param(
        cpu.CpuSteps,
        id="kernels",
        marks=pytest.mark.skipif(why_no_numba() is not None, reason="numba is not installed"),
    ),
]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 5), width=st.integers(1, 70), power=st.integers(-30, 30), seed=st.integers(0, 99))
@pytest.mark.parametrize("per", ["matrix", "row"])
def test_rounding_errs_by_half_a_step_and_keeps_zero(per: str, rows: int, width: int, power: int, seed: int) -> None:
    x = normal(rows, width, seed=seed, dtype=torch.float64) * 2.0**power
    x[0, 0] = 0.0
    rounded = quantize(x, per=per)
    assert ((x - int8.dequantize(rounded)).abs() <= rounded.scale * (0.5 + 1e-9)).all()
    assert rounded.values[0, 0] == 0
    assert torch.equal(quantize(-x, per=per).values, -rounded.values)
    again = quantize(int8.dequantize(rounded), per=per)
    assert torch.equal(again.values, rounded.values)
    torch.testing.assert_close(again.scale, rounded.scale, rtol=1e-14, atol=0)


@pytest.mark.parametrize("shape", [(0,), (1,), (127,), (3, 128), (5, 7, 11)])
def test_blocks_of_128_have_a_scale_each(shape: tuple[int, ...]) -> None:
    x = normal(*shape) * torch.logspace(-6, 6, max(shape[-1], 1))[: shape[-1]]
    rounded = int8.quantize_blocks(x)
    assert rounded.values.shape[1] == 128
    back = int8.dequantize_blocks(rounded, x.shape)
    bound = (rounded.scale.expand(-1, 128).reshape(-1)[: x.numel()] * 0.501).view(x.shape)
    assert ((back - x).abs() <= bound).all()


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_steps_agree_with_the_equation(steps, dtype: torch.dtype) -> None:
    x = normal(67, 45).to(dtype)
    x[3] = 0.0
    _, scale = reference.round_to_int8(x.double(), dim=-1)
    rounded = steps.round_rows(x)
    torch.testing.assert_close(rounded.scale.double(), scale, rtol=1e-6, atol=0)
    # Ties may fall on either side.
    assert ((rounded.values - x.double() / scale.masked_fill(scale == 0, 1)).abs() <= 0.5 + 1e-5).all()
    product = portable.multiply(rounded.values, rounded.values.t())
    assert torch.equal(product.double(), rounded.values.double() @ rounded.values.double().T)
    factor, bias = torch.tensor(0.3), normal(67)
    expected = product * rounded.scale.double() * 0.3 + bias
    result = steps.scale_rows(product, rounded.scale, factor, bias, dtype)
    assert result.dtype == dtype
    assert (result - expected).norm() <= (1e-6 if dtype == torch.float32 else 3e-3) * expected.norm()


@pytest.mark.parametrize("steps", STEPS)
def test_random_rounding_is_right_on_average_and_repeatable(steps) -> None:
    x, row_scale = normal(4, 33), normal(4, 1, seed=3).abs()
    torch.manual_seed(5)
    first = steps.round_rows(x, portable.draw_seed()).values
    torch.manual_seed(5)
    assert torch.equal(steps.round_rows(x, portable.draw_seed()).values, first)
    assert not torch.equal(steps.round_rows(x, portable.draw_seed()).values, first)
    for draw, expected in (
        (lambda: steps.round_rows(x, portable.draw_seed()), x),
        (lambda: steps.round_columns_randomly(x, row_scale), (x * row_scale).t()),
    ):
        scale = draw().scale
        mean = torch.stack([int8.dequantize(draw()) for _ in range(400)]).mean(dim=0)
        assert ((mean - expected).abs() <= 5 * 0.5 / 400**0.5 * scale + 1e-6).all()
        assert ((int8.dequantize(draw()) - expected).abs() <= scale * 1.001).all()


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_linear_is_the_equation(name: str, dtype: torch.dtype, tolerance: float) -> None:
    x, weight, bias = make_inputs(name, dtype=dtype)
    result = int8_linear(x, weight, bias, factor=0.7)
    expected = reference.int8_linear(x, weight, bias, factor=0.7)
    assert result.dtype == dtype
    assert (result - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("name", OUTER_SHAPES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-3)])
def test_block_outer_is_the_equation(name: str, dtype: torch.dtype, tolerance: float) -> None:
    inputs = outer_inputs(name, dtype=dtype)
    result, expected = int8_block_outer(*inputs, factor=0.7), reference.int8_block_outer(*inputs, factor=0.7)
    assert (result - expected).norm() <= tolerance * expected.norm()


def test_many_blocks_of_pairs_go_through_the_kernel() -> None:
    inputs = normal(6, 32, 4), normal(6, 32, 4, seed=1), normal(9, 32, 4, 4, seed=2)
    portably = with_gradients(int8_block_outer, inputs, torch.float64)
    check_near(with_gradients(int8_block_outer, inputs), portably, 1e-5)


@pytest.mark.parametrize("name", SHAPES)
def test_the_gradient_is_that_of_the_rounded_product(name: str) -> None:
    x, weight, bias = (tensor.requires_grad_() for tensor in make_inputs(name))
    rounded = [int8.dequantize(quantize(x, per="row")), int8.dequantize(quantize(weight, per="matrix")), bias.detach()]
    plain = [tensor.clone().requires_grad_() for tensor in rounded]
    for result, expected in zip(
        torch.autograd.grad(int8_linear(x, weight, bias, factor=0.7).sin().sum(), (x, weight, bias)),
        torch.autograd.grad((0.7 * torch.nn.functional.linear(*plain[:2]) + plain[2]).sin().sum(), plain),
        strict=True,
    ):
        torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_int8_gradients_are_right_on_average(dtype: torch.dtype) -> None:
    x, weight, _ = (tensor.to(dtype).requires_grad_() for tensor in make_inputs("a projection"))
    left, right, outer = (tensor.to(dtype).requires_grad_() for tensor in outer_inputs("TScale's combiner"))
    torch.manual_seed(0)
    for call, inputs in (
        (lambda how: int8_linear(x, weight, backward=how), (x, weight)),
        (lambda how: int8_block_outer(left, right, outer, backward=how), (left, right, outer)),
    ):
        direction = torch.randn_like(call("float"))
        exact = torch.autograd.grad(call("float"), inputs, direction)
        draws = [torch.autograd.grad(call("int8"), inputs, direction) for _ in range(50)]
        for index, expected in enumerate(exact):
            one, mean = draws[0][index], torch.stack([draw[index].float() for draw in draws]).mean(dim=0)
            assert (one - expected).norm() <= 0.05 * expected.norm()
            assert (mean - expected).norm() <= 0.01 * expected.norm()


def test_the_product_does_not_overflow_where_sums_are_longest() -> None:
    values = torch.full((1, portable.LONGEST_SUM), 127, dtype=torch.int8)
    assert portable.multiply(values, values.t()).item() == 127**2 * portable.LONGEST_SUM
    with pytest.raises(InputError, match="weight: rows of"):
        int8_linear(torch.ones(1, portable.LONGEST_SUM + 1), torch.ones(1, portable.LONGEST_SUM + 1))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("steps", STEPS)
def test_what_is_not_finite_is_not_hidden(steps, bad: float) -> None:
    x, weight, _ = make_inputs("odd widths", dtype=torch.float32)
    x[1, 2, 3] = bad
    rounded = steps.round_rows(x[1])
    assert not rounded.scale[2].isfinite()
    result = int8_linear(x, weight)
    assert not result[1, 2].isfinite().any()
    assert result[0].isfinite().all()


def test_tokens_are_rounded_one_by_one() -> None:
    x, weight, _ = make_inputs("a projection", dtype=torch.float32)
    loud = x.clone()
    loud[:, 40:] *= 1e6
    assert torch.equal(int8_linear(loud, weight)[:, :40], int8_linear(x, weight)[:, :40])
    assert torch.equal(int8_linear(x[:, :1], weight), int8_linear(x, weight)[:, :1])


def test_two_bits_are_the_four_values_of_the_source() -> None:
    weight = torch.tensor([-3.0, -0.76, -0.74, -0.01, 0.01, 0.74, 0.76, 3.0])
    others = torch.full((100,), float((108 - weight.square().sum()) / 100) ** 0.5)
    simulated = int8.simulate_rounding(torch.cat([weight, others]), "sim_2bit")  # variance 1: a step of 1/32
    torch.testing.assert_close(simulated[:8] * 32, torch.tensor([-36.0, -36, -12, -12, 12, 12, 36, 36]))


@pytest.mark.parametrize(("levels", "count"), int8.LEVELS.items())
def test_levels_are_so_many_and_pass_the_gradient_on(levels: str, count: int) -> None:
    weight = normal(64, 64).requires_grad_()
    simulated = int8.simulate_rounding(weight, levels)
    assert len(simulated.unique()) == count
    torch.testing.assert_close(-simulated.unique().flip(0), simulated.unique())
    direction = normal(64, 64, seed=1)
    assert torch.equal(torch.autograd.grad(simulated, weight, direction)[0], direction)
    assert not int8.simulate_rounding(torch.zeros(3, 3), levels).any()
    rounded = int8.round_weight(weight, levels)
    x = normal(5, 64, seed=2)
    torch.testing.assert_close(int8_linear(x, weight, levels=levels), int8_linear(x, rounded))


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match="weight: shape"):
        int8.int8_linear(torch.ones(2, 3), torch.ones(4, 5))
    with pytest.raises(InputError, match="weight: shape"):
        int8.int8_block_outer(torch.ones(2, 3, 4), torch.ones(2, 3, 4), torch.ones(5, 3, 4, 2))
    with pytest.raises(InputError, match="levels: 'two'"):
        int8.round_weight(torch.ones(3), "two")


@pytest.mark.parametrize("backward", ["float", "int8"])
def test_pairs_of_many_rows_are_held_a_part_at_a_time(backward: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which changes the order of the weight's sums and, where gradients are rounded at random, the numbers drawn."""
    left, right, weight = outer_inputs("TScale's combiner")
    left, right = (x.flatten(0, -3).repeat(40, 1, 1).float() for x in (left, right))
    weight, found = int8.round_weight(weight.float()), []
    for most in (portable.block_outer.MANY_NUMBERS, 1):
        monkeypatch.setattr(portable.block_outer, "MANY_NUMBERS", most)
        torch.manual_seed(0)
        given = [x.clone().requires_grad_() for x in (left, right)] + [
            torch.zeros(weight.values.shape).requires_grad_()
        ]
        result = Int8BlockOuter.apply(*given, *weight, 1.0, backward, portable.PortableSteps)
        found.append([result, *torch.autograd.grad(result.sin().sum(), given)])
    assert len(left) > portable.block_outer.FEWEST_ROWS
    for one, other in zip(*found, strict=True):
        tolerance = 1e-5 if backward == "float" or one is found[0][0] else 0.05
        assert (one - other).norm() <= tolerance * one.norm()


def test_one_graph_is_for_any_number_of_rows() -> None:
    weight, graphs = int8.round_weight(normal(6, 2, 4, 4)), []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    @torch.compile(dynamic=True, backend=backend)
    def contract(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return Int8BlockOuter.apply(left, right, None, *weight, 1.0, "float", portable.PortableSteps)

    for rows in (5, 7, 200):
        contract(normal(rows, 2, 4), normal(rows, 2, 4, seed=1))
    assert len(graphs) == 1


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("seed", range(4))
def test_gradients_in_bf16_are_those_in_float32(steps: type[portable.PortableSteps], seed: int) -> None:
    """Of the same integers, with a factor that bf16 does not hold."""
    left, right, weight = (x.bfloat16() for x in outer_inputs("TScale's combiner", seed=seed))
    direction = normal(*left.shape[:-2], len(weight), seed=seed).bfloat16()
    rounded, found = int8.round_weight(weight), []
    for dtype in (torch.float32, torch.bfloat16):
        given = [x.to(dtype).requires_grad_() for x in (left, right, weight)]
        result = Int8BlockOuter.apply(*given, *rounded, 0.7, "float", steps)
        found.append([result, *torch.autograd.grad(result, given, direction.to(dtype))])
    for expected, result in zip(*found, strict=True):
        assert (result.float() - expected).norm() <= 4e-3 * expected.norm()
