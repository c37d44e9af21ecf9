"""The GPU's steps of int8 products: the portable ones' integers, and results and gradients of the rounded numbers."""

import pytest
import torch

from multilin.ops.int8 import dequantize, round_weight
from multilin.ops.int8.gpu import GpuSteps
from multilin.ops.int8.portable import PortableSteps, draw_seed
from multilin.ops.int8.products import Int8BlockOuter, Int8Linear
from multilin.ops.int8.rounding import Rounded
from tests.ops.cases.block_outer import SHAPES as OUTER_SHAPES
from tests.ops.cases.block_outer import make_inputs as outer_inputs
from tests.ops.cases.int8 import SHAPES, make_inputs
from tests.ops.comparing import poison_memory

pytestmark = pytest.mark.slow  # interpreted, where there is no card

DTYPES = [torch.float32, torch.bfloat16]
LARGE = {"TScale": ((8192,), 128, 4, 4, 512), "3Lin": ((4096,), 32, 16, 16, 512), "ELiTA": ((4096,), 1, 512, 8, 512)}


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def near(result: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    return bool((result.double() - expected.double()).norm() <= tolerance * expected.double().norm())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 13), (3, 5000)], ids=str)
def test_rows_are_rounded_as_the_portable_path_does(shape, dtype: torch.dtype, device: torch.device) -> None:
    """Bit for bit: zeros, ties and tiny numbers too, from rows that lie in a wider tensor."""
    x = normal(*shape).to(dtype)
    x[0] = 0.0
    x[1, :4] = torch.tensor([127.0, 0.5, 1.5, -2.5])
    x[2] *= 1e-30
    wide = torch.cat([x, x], dim=1).to(device)[:, : shape[1]]
    expected, result = PortableSteps.round_rows(x), GpuSteps.round_rows(wide)
    assert torch.equal(result.values.cpu(), expected.values)
    assert torch.equal(result.scale.cpu(), expected.scale)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, while interpreting
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_is_not_hidden(bad: float, device: torch.device) -> None:
    x = normal(3, 20).to(device)
    x[1, 7] = bad
    rounded = GpuSteps.round_rows(x)
    assert rounded.scale[:, 0].isfinite().tolist() == [True, False, True]
    result = GpuSteps.scaled_product(rounded, rounded.values.t(), torch.ones((), device=device), None, torch.float32)
    assert not result[1].isfinite().any()
    left, right = normal(3, 2, 4).to(device), normal(3, 2, 4, seed=1).to(device)
    right[2, 1, 0] = bad
    values = torch.ones(5, 2, 4, 4, dtype=torch.int8, device=device)
    outer = GpuSteps.outer(left, right, values, torch.ones((), device=device), torch.float32)
    assert outer.isfinite().all(dim=1).tolist() == [True, True, False]


def test_random_rounding_is_right_on_average_and_repeatable(device: torch.device) -> None:
    x, row_scale = normal(3, 17).to(device), normal(3, 1, seed=3).abs().to(device)
    torch.manual_seed(5)
    first = GpuSteps.round_rows(x, draw_seed()).values
    torch.manual_seed(5)
    assert torch.equal(GpuSteps.round_rows(x, draw_seed()).values, first)
    assert not torch.equal(GpuSteps.round_rows(x, draw_seed()).values, first)
    for draw, expected in (
        (lambda: GpuSteps.round_rows(x, draw_seed()), x),
        (lambda: GpuSteps.round_columns_randomly(x, row_scale), (x * row_scale).t()),
    ):
        draws = [dequantize(draw()) for _ in range(60)]
        scale = draw().scale
        assert ((torch.stack(draws).mean(dim=0) - expected).abs() <= 5 * 0.5 / 60**0.5 * scale + 1e-6).all()
        assert ((draws[0] - expected).abs() <= scale * 1.001).all()


def test_column_scales_are_the_portable_ones(device: torch.device) -> None:
    x, row_scale = normal(300, 7).to(device), normal(300, 1, seed=1).abs().to(device)
    found = GpuSteps.round_columns_randomly(x, row_scale)
    expected = PortableSteps.round_columns_randomly(x, row_scale)
    assert torch.equal(found.scale, expected.scale)
    assert ((found.values - expected.values).abs() <= 1).all()


def check_linear(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
    """Result and gradients equal to the portable path's; in bf16 within its rounding."""
    rows, width, num_outs = shape
    generator = torch.Generator(device).manual_seed(0)
    sizes = ((rows, width), (num_outs, width), (num_outs,), (rows, num_outs))
    x, weight, bias, direction = (torch.randn(s, generator=generator, device=device).to(dtype) for s in sizes)
    rounded, found = round_weight(weight), []
    for steps in (PortableSteps, GpuSteps):
        given = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
        result = Int8Linear.apply(given[0], given[1], *rounded, given[2], 0.7, "float", steps)
        found.append([result, *torch.autograd.grad(result, given, direction)])
    for expected, result in zip(*found, strict=True):
        assert result.dtype == expected.dtype
        assert near(result, expected, 1e-6 if dtype == torch.float32 else 1e-3)
    exact = torch.autograd.grad(
        Int8Linear.apply(*given[:2], *rounded, None, 0.7, "int8", GpuSteps), given[:2], direction
    )
    for result, expected in zip(exact, found[0][1:], strict=False):
        assert near(result, expected, 0.05)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_linear(name: str, dtype: torch.dtype, device: torch.device, monkeypatch) -> None:
    poison_memory(monkeypatch)
    x, weight, _ = make_inputs(name)
    check_linear((x[..., 0].numel(), *reversed(weight.shape)), dtype, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(8192, 512, 2048), (4095, 1031, 777), (1, 4096, 512)], ids=str)
def test_linear_at_size(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
    check_linear(shape, dtype, device)


@pytest.mark.gpu
@pytest.mark.parametrize("way", [1, 2, 3])
def test_every_way_to_compile_is_right(way: int, device: torch.device) -> None:
    check_linear((1031, 513, 771), torch.bfloat16, device)


def check_outer(inputs: tuple[torch.Tensor, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Integers are the portable path's in float32; the gradients those of the rounded pairs."""
    left, right, weight = (x.to(device, dtype) for x in inputs)
    rounded, found = round_weight(weight), []
    direction = normal(*left.shape[:-2], len(weight), seed=9).to(device, dtype)
    for steps, kind in ((PortableSteps, torch.float32), (GpuSteps, dtype)):
        given = [x.to(kind).requires_grad_() for x in (left, right, weight)]
        result = Int8BlockOuter.apply(*given, *rounded, 0.7, "float", steps)
        found.append([result, *torch.autograd.grad(result, given, direction.to(kind))])
    for expected, result in zip(*found, strict=True):
        assert result.dtype == dtype
        # Of a few numbers in bf16 most may be rounded far.
        assert near(result, expected, 1e-5 if dtype == torch.float32 else 4e-3 if result.numel() > 99 else 8e-3)
    result = Int8BlockOuter.apply(*given, *rounded, 0.7, "int8", GpuSteps)
    for one, expected in zip(torch.autograd.grad(result, given, direction), found[0][1:], strict=True):
        assert near(one, expected, 0.05)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OUTER_SHAPES)
def test_outer(name: str, dtype: torch.dtype, device: torch.device, monkeypatch) -> None:
    poison_memory(monkeypatch)
    check_outer(outer_inputs(name), dtype, device)


@pytest.mark.gpu
@pytest.mark.parametrize("name", LARGE)
def test_outer_at_size(name: str, device: torch.device, monkeypatch) -> None:
    monkeypatch.setitem(OUTER_SHAPES, name, LARGE[name])
    check_outer(outer_inputs(name), torch.bfloat16, device)


def test_the_product_is_exact_where_sums_are_long(device: torch.device) -> None:
    values = torch.full((1, 1040), 127, dtype=torch.int8, device=device)
    one = torch.ones((1, 1), device=device)
    result = GpuSteps.scaled_product(Rounded(values, one), values.t(), one[0, 0], None, torch.float32)
    assert result.item() == 127**2 * 1040  # below 2^24, which float32 holds


def test_compiled_is_eager(device: torch.device) -> None:
    x, weight = normal(3, 8).to(device).requires_grad_(), normal(5, 8, seed=1).to(device)
    rounded = round_weight(weight)

    def linear(x: torch.Tensor) -> torch.Tensor:
        return Int8Linear.apply(x, None, rounded.values, rounded.scale, None, 1.0, "float", GpuSteps)

    compiled = torch.compile(linear, fullgraph=True, dynamic=True, backend="aot_eager")
    results = [function(x) for function in (linear, compiled)]
    assert torch.equal(results[0], results[1])
    gradients = [torch.autograd.grad(result.sum(), x)[0] for result in results]
    assert torch.equal(*gradients)


def test_the_ops_are_well_formed_operators(device: torch.device) -> None:
    x, ops = normal(3, 8).to(device), torch.ops.multilin
    rounded, left, right = GpuSteps.round_rows(x), normal(3, 2, 4).to(device), normal(3, 2, 4, seed=1).to(device)
    factor, scale = torch.ones((), device=device), torch.ones(3, 1, device=device)
    for operator, arguments in (
        (ops.int8_round_rows.default, (x, None)),
        (ops.int8_round_columns.default, (x, scale, draw_seed())),
        (ops.int8_scaled_product.default, (*rounded, rounded.values.t(), factor, None, torch.float32)),
        (ops.int8_round_pairs.default, (left, right)),
    ):
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))
