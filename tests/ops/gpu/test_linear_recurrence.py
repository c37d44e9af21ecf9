"""Triton's kernels of linear_recurrence: held against the definition in float64, interpreted or on a card."""

from functools import partial

import pytest
import torch

from multilin.ops.linear_recurrence import LINEAR_RECURRENCE, gpu, operator, reference
from tests.ops.cases.linear_recurrence import GATES, SHAPES, make_inputs
from tests.ops.comparing import TOLERANCE, check_near, poison_memory, with_gradients

pytestmark = pytest.mark.slow  # interpreted, where there is no card

LARGE = {"long": (1, 100_001, 40), "many channels": (2, 4096, 1536), "many texts": (200, 130, 200)}

linear_recurrence = partial(operator.linear_recurrence, "gpu")


@pytest.fixture(autouse=True)
def small_and_poisoned(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Small tiles while interpreting, which takes long for a scan."""
    poison_memory(monkeypatch)
    if device.type == "cpu":
        monkeypatch.setattr(gpu, "CHUNK", 16)
        monkeypatch.setattr(gpu, "BLOCK", 8)


def check(gates: str, shape: str, dtype: torch.dtype, device: torch.device, *, packed: bool = True) -> None:
    """Hidden states, the last of them and the gradients; inputs lie in a wider tensor."""
    inputs, before, starts = (x.to(device) for x in make_inputs(gates, shape))
    inputs = torch.cat([inputs, inputs], dim=-1).to(dtype)[..., : inputs.shape[-1]]
    before, starts = before.float(), starts if packed else None
    found = with_gradients(lambda *x: linear_recurrence(*x, starts), (inputs, before))
    exact = with_gradients(lambda *x: reference.linear_recurrence(*x, starts), (inputs, before), torch.float64)
    assert [x.dtype for x in found] == [dtype, torch.float32] * 2
    check_near(found, exact, TOLERANCE[dtype])


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("shape", ["odd sizes", "one token"])
def test_it_is_the_definition(shape: str, gates: str, device: torch.device) -> None:
    for is_packed in (False, True):
        check(gates, shape, torch.float32, device, packed=is_packed)


@pytest.mark.parametrize("gates", ["random", "some shut"])
def test_time_is_cut_in_parts_where_texts_and_channels_are_few(
    gates: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu._launch, "num_processors", lambda device: 40)
    monkeypatch.setitem(SHAPES, "several parts", (1, 64 * 5 + 3 if device.type == "cpu" else 1100, 5))
    check(gates, "several parts", torch.float32, device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("gates", ["random", "open"])
def test_it_is_the_definition_in_half_precision(gates: str, dtype: torch.dtype, device: torch.device) -> None:
    check(gates, "odd sizes", dtype, device)


def test_dispatch_takes_the_kernels_for_gpus() -> None:
    assert LINEAR_RECURRENCE.backend_for(torch.device("cuda"), torch.bfloat16).name.startswith("triton")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", LARGE)
def test_large_shapes(shape: str, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, shape, LARGE[shape])
    check("nearly shut", shape, dtype, device)


def test_the_operator_keeps_the_contract_of_operators(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    inputs, before, starts = (x.to(device) for x in make_inputs("random", "odd sizes", dtype=torch.float32))
    arguments = ("gpu", inputs.requires_grad_(), before.requires_grad_(), starts)
    torch.library.opcheck(torch.ops.multilin.linear_recurrence.default, arguments)
