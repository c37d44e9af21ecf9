"""block_outer: the portable path against the equation, and the combiners written with xor."""

import pytest
import torch

from multilin.errors import InputError
from multilin.ops import block_outer as unchecked
from multilin.ops.block_outer import cpu, portable, reference
from multilin.ops.kernels import why_no_numba
from tests.golden.xor import xor_combiner, xor_weight
from tests.ops.cases.block_outer import SHAPES, make_inputs
from tests.ops.checked import block_outer
from tests.ops.comparing import LargestTensor, check_near, with_gradients


@pytest.mark.parametrize("name", SHAPES)
def test_result_and_gradients_are_those_of_the_equation(name: str) -> None:
    found, exact = (with_gradients(op.block_outer, make_inputs(name)) for op in (portable, reference))
    torch.testing.assert_close(found, exact, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("low", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-3)])
def test_precision_against_float64(name: str, low: torch.dtype, tolerance: float) -> None:
    inputs = [x.to(low) for x in make_inputs(name)]
    check_near(*(with_gradients(block_outer, inputs, dtype) for dtype in (low, torch.float64)), tolerance)


@pytest.mark.skipif(why_no_numba() is not None, reason=str(why_no_numba()))
@pytest.mark.usefixtures("threads", "poisoned")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shapes", [(4, 4), (16, 16), (4, 8), (12, 8), (3, 16)], ids=str)
def test_kernels_make_pairs_and_gradients_of_their_factors(shapes, dtype) -> None:
    """The last one's end is the end of memory."""
    left, right = (torch.randn(7, 5, width).to(dtype) for width in shapes)
    dpairs = torch.randn(7, 5, *shapes).to(dtype)
    exact = [x.double() for x in (left, right, dpairs)]
    expected = (
        exact[0][..., None] * exact[1][..., None, :],
        (exact[2] * exact[1][..., None, :]).sum(dim=-1),
        (exact[2] * exact[0][..., None]).sum(dim=-2),
    )
    found = cpu.expand(left, right).view_as(dpairs), *cpu.contract_pairs(dpairs, left, right)
    tolerance = 1e-6 if dtype == torch.float32 else 4e-3
    assert {x.dtype for x in found} == {dtype}
    check_near(found, expected, tolerance)


def test_all_rows_pairs_are_never_held_at_once_nor_kept(monkeypatch) -> None:
    """Kept for the backward pass: inputs only. The result does not depend on the chunks."""
    num_pairs, rows = 8 * 16 * 16, 1024
    left, right = (torch.randn(rows, 8, 16, requires_grad=True) for _ in range(2))
    weight, kept = torch.randn(3, 8, 16, 16, requires_grad=True), []
    results = []
    for rows_per_chunk in (rows, 128):
        monkeypatch.setitem(portable.NUMBERS, "cpu", rows_per_chunk * num_pairs)
        with (
            LargestTensor() as watch,
            torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x),
        ):
            result = block_outer(left, right, weight)
            results.append([result, *torch.autograd.grad(result.sin().sum(), (left, right, weight))])
        assert watch.numbers == rows_per_chunk * num_pairs
    assert max(kept) <= left.numel()
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("block", [1, 4, 16])
def test_xor_pairs_are_the_pairs_inside_blocks(block: int) -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(32, generator=generator, dtype=torch.float64) for _ in range(2))
    combiner = torch.randn(5, block, 32, generator=generator, dtype=torch.float64)
    expected = sum(combiner[:, b, i] * left[i ^ b] * right[i] for b in range(block) for i in range(32))
    weight = xor_weight(combiner, block=block)
    result = block_outer(left.view(-1, block), right.view(-1, block), weight)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(xor_combiner(weight), combiner)


def test_shapes_that_do_not_fit_are_named() -> None:
    with pytest.raises(InputError, match="weight: shape"):
        unchecked.block_outer(torch.zeros(2, 3), torch.zeros(2, 4), torch.zeros(1, 2, 3, 5))
    with pytest.raises(InputError, match="combiner: shape"):
        xor_weight(torch.zeros(2, 4, 6), block=4)
