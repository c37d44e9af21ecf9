"""rotary: complex numbers that are turned, and laws of rotations."""

import pytest
import torch
from torch import Tensor

from multilin.errors import InputError
from multilin.layers.blocks import rotary_angles, rotate
from multilin.ops import rotary as unchecked
from tests.ops.checked import rotary


def make_inputs(width: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """x of two heads of this width, and cos and sin of any angles."""
    generator = torch.Generator().manual_seed(0)
    x, angle = (torch.randn(2, 11, *size, generator=generator, dtype=dtype) for size in ((2, width), (width // 2,)))
    return x, (7 * angle).cos(), (7 * angle).sin()


@pytest.mark.parametrize(("width", "block"), [(128, 64), (6, 6), (10, 2)])
def test_it_turns_complex_numbers_and_its_gradient_turns_back(width: int, block: int) -> None:
    x, cos, sin = make_inputs(width)
    pairs = x.unflatten(-1, (-1, 2, block // 2))
    turn = torch.complex(cos, sin).unflatten(-1, (-1, block // 2))[:, :, None]
    turned = torch.complex(pairs[..., 0, :], pairs[..., 1, :]) * turn
    result = rotary(x.requires_grad_(), cos, sin, block=block)
    torch.testing.assert_close(result, torch.stack([turned.real, turned.imag], dim=-2).flatten(-3))
    (gradient,) = torch.autograd.grad(result.square().sum() / 2, x)
    torch.testing.assert_close(gradient, x)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)], ids=str)
def test_precision_against_float64(dtype: torch.dtype, tolerance: float) -> None:
    x, cos, sin = make_inputs(128)
    result, exact = (
        rotary(x.to(dtype), cos.float(), sin.float(), block=64),
        rotary(x.to(dtype).double(), cos, sin, block=64),
    )
    assert result.dtype == dtype
    assert (result - exact).norm() <= tolerance * exact.norm()


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


def test_what_does_not_fit_is_named() -> None:
    x, cos, sin = make_inputs(6)
    with pytest.raises(InputError, match="block: 4 given"):
        unchecked.rotary(x, cos, sin, block=4)
    with pytest.raises(InputError, match="cos: shape"):
        unchecked.rotary(x, cos[:, 1:], sin, block=6)
