"""tile_norm: the kernels against the definition in float64, and laws of the definition."""

import pytest
import torch
from torch import Tensor

from multilin.errors import InputError
from multilin.layers.blocks import TileNorm
from multilin.ops import tile_norm as unchecked
from multilin.ops.kernels import why_no_numba
from multilin.ops.tile_norm import reference
from tests.ops.cases.tile_norm import SHAPES, make_input
from tests.ops.checked import tile_norm

pytestmark = pytest.mark.usefixtures("poisoned")
TYPES = [
    (torch.float32, torch.float32, 1e-5),
    (torch.bfloat16, torch.bfloat16, 4e-3),
    (torch.float32, torch.bfloat16, 4e-3),
    (torch.bfloat16, torch.float32, 4e-3),
]
WIDE = [name for name in SHAPES if name != "single numbers"]


def result_and_gradient(x: Tensor, tile: int | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    needed = x.detach().requires_grad_()
    result = tile_norm(needed, tile=tile, dtype=dtype)
    weight = torch.randn(result.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return result.detach(), torch.autograd.grad(result, needed, weight.to(torch.bfloat16).to(dtype))[0]


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("dtype", "result_dtype", "tolerance"), TYPES, ids=str)
@pytest.mark.parametrize("name", WIDE)
def test_precision_against_float64(name, dtype, result_dtype, tolerance) -> None:
    x, tile = make_input(name).to(dtype), SHAPES[name][1]
    found = result_and_gradient(x, tile, result_dtype)
    exact = result_and_gradient(x.double(), tile, torch.float64)
    assert [x.dtype for x in found] == [result_dtype, dtype]
    # Row by row: rows differ a thousandfold in size.
    for result, expected in zip(found, exact, strict=True):
        error, size = ((y.double()).norm(dim=-1) for y in (result - expected, expected))
        assert bool((error <= tolerance * size).all())
    assert torch.equal(found[0], tile_norm(x, tile=tile, dtype=result_dtype))


def test_a_tile_of_one_number_is_its_sign() -> None:
    x = make_input("single numbers").float()
    result, gradient = result_and_gradient(x, 1, torch.float32)
    torch.testing.assert_close(result, x.sign())
    torch.testing.assert_close(gradient * x, torch.zeros_like(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_zero_tiles_stay_zero_and_have_no_gradient(dtype: torch.dtype) -> None:
    x = torch.ones(3, 8, dtype=dtype)
    x[1, 4:] = 0
    result, gradient = result_and_gradient(x, 4, dtype)
    assert torch.equal(result, x)
    assert torch.equal(gradient[1, 4:], torch.zeros(4, dtype=dtype))


def test_nan_and_inf_do_not_vanish() -> None:
    for bad in (torch.nan, torch.inf):
        x = torch.ones(2, 8)
        x[0, 3] = bad
        for dtype in (torch.float32, torch.bfloat16):
            result = tile_norm(x, dtype=dtype)
            assert bool(result[0, 3].isnan())
            assert torch.equal(result[1], x[1].to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_numbers_whose_squares_are_too_large_do_not_vanish(dtype: torch.dtype) -> None:
    x = torch.ones(2, 8, dtype=dtype)
    x[0] = 1e20
    for compute in (tile_norm, lambda x: reference.tile_norm(x, 8, dtype)):
        result = compute(x)
        assert bool(result[0].isnan().all())
        assert torch.equal(result[1], x[1])


@pytest.mark.skipif(why_no_numba() is not None, reason=str(why_no_numba()))
def test_the_operator_keeps_the_contract_of_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    torch.library.opcheck(
        torch.ops.multilin.tile_norm.default, (torch.randn(3, 5, 8, requires_grad=True), 4, torch.float32)
    )


def test_without_kernels_the_definition_computes() -> None:
    x = torch.randn(3, 8)
    torch.testing.assert_close(reference.tile_norm(x, 4, torch.float32), tile_norm(x, tile=4))
    assert tile_norm(x.half(), tile=4).dtype == torch.float16
    assert tile_norm(x, tile=4, dtype=torch.float64).dtype == torch.float64


def test_the_layer_gives_what_the_next_product_reads() -> None:
    norm, x = TileNorm(4), torch.randn(2, 8)
    assert norm(x).dtype == torch.float32
    assert norm(x.bfloat16()).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert norm(x).dtype == torch.bfloat16
        assert norm(x.double()).dtype == torch.float64


@pytest.mark.parametrize("tile", [0, 3, 16])
def test_a_tile_that_does_not_fit_is_named(tile: int) -> None:
    with pytest.raises(InputError, match=f"tile: {tile} given"):
        unchecked.tile_norm(torch.zeros(2, 8), tile=tile)
