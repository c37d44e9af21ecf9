"""block_outer's Triton kernels against the equation in float64."""

import pytest
import torch

from multilin.ops.block_outer import BLOCK_OUTER, gpu, reference
from tests.ops.poison import poison_memory

pytestmark = pytest.mark.slow  # interpreted, where there is no card

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 1e-3}
SMALL = {
    "3Lin": (67, 3, 16, 16, 21),
    "TScale": (37, 5, 4, 4, 70),
    "ELiTA": (5, 1, 130, 8, 33),
    "odd blocks": (21, 3, 5, 3, 7),
    "pairs of one": (3, 7, 1, 1, 2),
    "one row": (1, 2, 16, 16, 5),
}
"""Rows, blocks, widths of the left and right blocks, outputs."""
LARGE = {
    "3Lin": (8192, 32, 16, 16, 512),
    "TScale": (8191, 128, 4, 4, 512),
    "ELiTA": (8192, 1, 768, 8, 768),
    "decode": (64, 128, 4, 4, 512),
}


def check(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Result and gradients, from factors that lie in a wider tensor, by relative root mean square."""
    rows, blocks, left_width, right_width, num_outs = shape
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device).to(dtype)

    cut = blocks * left_width
    wide = normal(rows, blocks * (left_width + right_width) + 3)
    left, right = wide[:, :cut].unflatten(1, (blocks, -1)), wide[:, cut:-3].unflatten(1, (blocks, -1))
    inputs = [left, right, normal(num_outs, blocks, left_width, right_width)]
    direction = normal(rows, num_outs)
    found = []
    for compute, kind in ((reference.block_outer, torch.float64), (gpu.block_outer, dtype)):
        given = [x.detach().to(kind).requires_grad_() for x in inputs]
        if kind == dtype:
            given = [x.detach().requires_grad_() for x in inputs]
        result = compute(*given)
        found.append([result, *torch.autograd.grad(result, given, direction.to(kind))])
    for expected, result in zip(*found, strict=True):
        assert result.dtype == dtype
        assert (result.double() - expected).norm() <= TOLERANCES[dtype] * expected.norm()
    with torch.no_grad():
        assert torch.equal(gpu.block_outer(*inputs), found[1][0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", SMALL)
def test_result_and_gradients(name: str, dtype: torch.dtype, device: torch.device, monkeypatch) -> None:
    poison_memory(monkeypatch)
    check(SMALL[name], dtype, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", LARGE)
def test_result_and_gradients_at_size(name: str, dtype: torch.dtype, device: torch.device) -> None:
    check(LARGE[name], dtype, device)


@pytest.mark.parametrize("processors", [1, 64])
def test_sums_split_over_programs_change_nothing(processors: int, device: torch.device, monkeypatch) -> None:
    """Few rows are given to many programs; their sums are added in float32."""
    monkeypatch.setattr(gpu._launch, "num_processors", lambda _: processors)
    check((3, 16, 8, 8, 11), torch.float32, device)


def test_compiled_is_eager(device: torch.device) -> None:
    inputs = [torch.randn(shape, device=device, requires_grad=True) for shape in ((5, 2, 4), (5, 2, 4), (7, 2, 4, 4))]
    compiled = torch.compile(gpu.block_outer, fullgraph=True, backend="aot_eager")
    results = [function(*inputs) for function in (gpu.block_outer, compiled)]
    gradients = [torch.autograd.grad(result.sin().sum(), inputs) for result in results]
    assert torch.equal(results[0], results[1])
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


def test_the_op_is_a_well_formed_operator(device: torch.device) -> None:
    inputs = [torch.randn(shape, device=device, requires_grad=True) for shape in ((3, 2, 4), (3, 2, 4), (5, 2, 4, 4))]
    torch.library.opcheck(torch.ops.multilin.block_outer_gpu.default, tuple(inputs))


def test_blocks_too_wide_are_refused_with_the_reason() -> None:
    backend = next(b for b in BLOCK_OUTER.backends if b.compute is gpu.block_outer)
    assert backend.refuses(*[torch.zeros(1, 1, 64)] * 2) is None
    assert "wider than 64" in str(backend.refuses(*[torch.zeros(1, 1, 65)] * 2))


def test_no_rows_give_no_rows() -> None:
    empty = [torch.zeros(shape, requires_grad=True) for shape in ((0, 2, 3), (0, 2, 5), (7, 2, 3, 5))]
    result = gpu.block_outer(*empty)
    assert result.shape == (0, 7)
    assert not torch.autograd.grad(result.sum(), empty)[2].any()
