"""rotary: the kernel against the definition in float64, and laws of rotations."""

import cmath

import pytest
import torch
from torch import Tensor

from multilin.errors import InputError
from multilin.layers.blocks import rotary_angles, rotate
from multilin.ops import rotary as unchecked
from multilin.ops.kernels import why_no_numba
from tests.ops.cases.rotary import SHAPES, make_inputs
from tests.ops.checked import rotary
from tests.ops.compiled import check_compiled

pytestmark = pytest.mark.usefixtures("poisoned")


def result_and_gradient(x: Tensor, cos: Tensor, sin: Tensor, block: int) -> tuple[Tensor, Tensor]:
    needed = x.detach().requires_grad_()
    result = rotary(needed, cos, sin, block=block)
    weight = torch.randn(result.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return result.detach(), torch.autograd.grad(result, needed, weight.to(torch.bfloat16).to(x.dtype))[0]


def test_the_definition_turns_complex_numbers() -> None:
    x, cos, sin = make_inputs("one block")
    turned = rotary(x, cos, sin, block=6)
    for n in range(3):
        expected = complex(x[1, 4, 0, n], x[1, 4, 0, n + 3]) * complex(cos[1, 4, n], sin[1, 4, n])
        assert cmath.isclose(complex(turned[1, 4, 0, n], turned[1, 4, 0, n + 3]), expected)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-3)], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_precision_against_float64(name, dtype, tolerance) -> None:
    (x, cos, sin), block = make_inputs(name), SHAPES[name][1]
    x = x.to(dtype)
    found = result_and_gradient(x, cos.float(), sin.float(), block)
    exact = result_and_gradient(x.double(), cos, sin, block)
    for result, expected in zip(found, exact, strict=True):
        assert result.dtype == dtype
        assert (result.double() - expected).norm() <= tolerance * expected.norm()
    assert torch.equal(found[0], rotary(x, cos.float(), sin.float(), block=block))


def test_gradients_by_finite_differences() -> None:
    x, cos, sin = make_inputs("single pairs")
    assert torch.autograd.gradcheck(lambda x: rotary(x, cos, sin, block=2), (x.requires_grad_(),))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_slices_give_what_copies_give(dtype: torch.dtype) -> None:
    whole, (_, cos, sin) = torch.randn(2, 11, 4, 18).to(dtype), make_inputs("one block", dtype=torch.float32)
    for x in (whole[:, :, 1:3, 6:12], whole[:, :, ::2, ::3], whole.flatten(2)[..., :12].unflatten(-1, (2, 6))):
        results = (result_and_gradient(y, cos, sin, 6) for y in (x, x.contiguous().clone()))
        assert all(torch.equal(found, expected) for found, expected in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_products_depend_on_distances_only_also_late_in_a_text(dtype: torch.dtype) -> None:
    x, y = (torch.randn(1, 1, 2, 128, dtype=dtype) for _ in range(2))

    def product(first: int, second: int) -> Tensor:
        turned = (
            rotate(z, rotary_angles(torch.tensor([[at]]), 128, 5e5, dtype)) for z, at in ((x, first), (y, second))
        )
        return torch.linalg.vecdot(*turned)

    tolerance = 1e-9 if dtype == torch.float64 else 1e-4
    torch.testing.assert_close(product(10**7 + 5, 10**7), product(5, 0), rtol=tolerance, atol=tolerance)
    assert not torch.allclose(product(5, 0), product(6, 0), atol=1e-3)


def test_compiled_is_eager() -> None:
    x, cos, sin = make_inputs("one block", dtype=torch.float32)
    check_compiled(lambda x: unchecked.rotary(x, cos, sin, block=6).sin().sum(), x)


@pytest.mark.skipif(why_no_numba() is not None, reason=str(why_no_numba()))
def test_the_operator_keeps_the_contract_of_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    x, cos, sin = make_inputs("one block", dtype=torch.float32)
    torch.library.opcheck(torch.ops.multilin.rotary.default, (x.requires_grad_(), cos, sin, 6, False))


def test_what_does_not_fit_is_named() -> None:
    x, cos, sin = make_inputs("one block")
    with pytest.raises(InputError, match="block: 4 given"):
        unchecked.rotary(x, cos, sin, block=4)
    with pytest.raises(InputError, match="cos: shape"):
        unchecked.rotary(x, cos[:, 1:], sin, block=6)
