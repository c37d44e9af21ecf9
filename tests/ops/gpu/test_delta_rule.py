"""delta_rule with Triton's kernels: held against the definition in float64, interpreted or on a card."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch.nn.functional import normalize

from multilin.ops.delta_rule import DELTA_RULE, gpu, portable, reference
from tests.ops.cases.delta_rule import SWITCHES, Inputs, make_inputs
from tests.ops.comparing import check_near, poison_memory, with_gradients

pytestmark = pytest.mark.slow  # interpreted, where there is no card

SHAPES = {"odd sizes": (2, 141, 2, 16, 8), "two blocks of values": (1, 130, 1, 13, 37), "one chunk": (1, 9, 2, 3, 5)}
LARGE = {"long": (1, 9000, 3, 128, 128), "narrow": (2, 2000, 4, 64, 64), "wide values": (2, 700, 2, 128, 500)}
TOLERANCES = {"highest": 1e-5, "high": 4e-3}  # in float32, and in tf32
delta_rule = partial(portable.delta_rule, kernels="gpu")


@contextmanager
def products(precision: str) -> Iterator[None]:
    """Inside, float32 is multiplied so; see `torch.set_float32_matmul_precision`."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def check(inputs: Inputs, device: torch.device, tolerance: float = TOLERANCES["highest"]) -> None:
    rounded = inputs.map(lambda x: x.float().to(device))
    exact = with_gradients(reference.delta_rule, rounded, torch.float64)
    check_near(with_gradients(delta_rule, rounded), exact, tolerance)


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_the_definition(name: str, shape: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    poison_memory(monkeypatch)
    check(make_inputs(name, *SHAPES[shape]), device)


def test_a_text_in_several_pieces(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(portable.NUMBERS, device.type, 1)
    check(make_inputs("gated delta rule", *SHAPES["odd sizes"]), device)


def test_dispatch_takes_the_kernel_for_gpus_and_refuses_what_it_cannot() -> None:
    wide, narrow = (torch.empty(1, 9, 1, width) for width in (129, 128))
    backend = DELTA_RULE.backend_for(torch.device("cuda"), torch.float32, (narrow,))
    assert backend.name.startswith("triton")
    with pytest.warns(UserWarning, match="delta_rule: triton.*keys of 129 numbers are wider than 128.*portable"):
        DELTA_RULE.backend_for(torch.device("cuda"), torch.float32, (wide,))


@pytest.mark.parametrize("length", [1, 5, 16, 37, 64])
def test_the_inverse_of_a_chunks_system(length: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with equal keys at rate 1, where powers of the matrix would overflow, and at rate 2."""
    poison_memory(monkeypatch)
    ones, keys = torch.ones(3, length, length), normalize(torch.randn(3, length, 24), dim=-1)
    for lower in (keys @ keys.mT, ones, 2 * ones):
        found, expected = gpu.invert(lower.to(device)).double(), portable.invert(lower.double()).to(device)
        assert (found - expected).norm() <= 1e-5 * expected.norm()


def test_kernels_multiply_as_pytorch_does(device: torch.device) -> None:
    from multilin.ops.kernels import gpu_launch

    for precision, expected in (("highest", "tf32x3"), ("high", "tf32")):
        with products(precision):
            assert gpu_launch.float32_products() == (expected if torch.version.hip is None else "ieee")


@pytest.mark.gpu
@pytest.mark.parametrize("precision", TOLERANCES)
@pytest.mark.parametrize("shape", LARGE)
@pytest.mark.parametrize("way", range(3))
def test_large_shapes(way: int, shape: str, precision: str, device: torch.device) -> None:
    with products(precision):
        check(make_inputs("gated delta rule", *LARGE[shape]), device, TOLERANCES[precision])


@pytest.mark.parametrize("name", ["gated delta rule", "gated linear attention"])
def test_compiled_is_eager(name: str, device: torch.device) -> None:
    inputs = make_inputs(name, 1, 141, 2, 16, 8).map(lambda x: x.float().to(device))
    compiled = torch.compile(delta_rule, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(with_gradients(compiled, inputs), with_gradients(delta_rule, inputs))


def test_the_operator_is_well_formed(device: torch.device) -> None:
    added, keys, over, memory = (
        torch.zeros(*shape, device=device) for shape in ((6, 8, 5), (6, 8, 3), (6, 1, 1), (2, 3, 5))
    )
    for read, through_q in ((keys, None), (None, torch.zeros(6, 3, 5, device=device))):
        arguments = (3, added, read, keys, over, through_q, memory)
        torch.library.opcheck(
            torch.ops.multilin.delta_rule_write.default, arguments, test_utils=("test_schema", "test_faketensor")
        )
    lower = torch.zeros(6, 8, 8, device=device).mT
    torch.library.opcheck(
        torch.ops.multilin.delta_rule_invert.default, (lower,), test_utils=("test_schema", "test_faketensor")
    )
