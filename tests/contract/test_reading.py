"""What layers say they read is what they read: of every architecture that says so."""

import inspect
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from multilin.architectures.base import get_architecture
from multilin.layers.reading import Reading, record_readings
from multilin.model import MultilinForCausalLM
from tests.contract.conftest import MakeModel, random_ids

OPS = ("prefix_softmax", "windowed_attention", "causal_mixing", "delta_rule")
LENGTH = 23


def readings_of(model: MultilinForCausalLM, ids: Tensor, **arguments: Any) -> list[Reading]:
    with record_readings(model.model.layers) as found, torch.no_grad():
        model(ids, use_cache=False, **arguments)
    return [reading for _, reading in found]


@pytest.fixture
def op_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple, dict, Tensor]]:
    """Every call of an op by a layer: its name, arguments and result."""
    calls: list[tuple[str, tuple, dict, Tensor]] = []

    def watched(name: str, op: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = op(*args, **kwargs)
            calls.append((name, args, kwargs, result[0]))
            return result

        return call

    callers = ("multilin.architectures.", "multilin.layers.")
    for module in [module for name, module in sys.modules.items() if name.startswith(callers)]:
        for name in OPS:
            if hasattr(module, name):
                monkeypatch.setattr(module, name, watched(name, getattr(module, name)))
    return calls


def calls_op(model: MultilinForCausalLM) -> bool:
    """Whether the file of the architecture names one of the ops."""
    architecture = get_architecture(model.config.layers[0]["architecture"])
    source = inspect.getsource(sys.modules[architecture.preset.__module__])
    return any(name in source for name in OPS)


def applied(name: str, args: tuple, reading: Reading) -> Tensor:
    """The weights applied to the values that the op was given, (B, T, H, D)."""
    values_BTHD = {"prefix_softmax": 1, "windowed_attention": 2, "causal_mixing": 0, "delta_rule": 2}[name]
    values_BTHD = args[values_BTHD][:, :, None] if name == "causal_mixing" else args[values_BTHD]
    result_BTHD = torch.einsum("bhts,bshd->bthd", reading.weights_BHTS, values_BTHD)
    if reading.own_BHT is not None:
        result_BTHD = result_BTHD + reading.own_BHT.transpose(1, 2)[..., None] * values_BTHD
    return result_BTHD


def test_weights_applied_to_the_values_are_what_was_read(make_model: MakeModel, op_calls: list) -> None:
    model = make_model()
    readings = readings_of(model, random_ids(2, LENGTH))
    if not calls_op(model):  # what its own arithmetic reads is held by the other tests
        return
    assert len(readings) == len(op_calls) > 0
    for reading, (name, args, _, result) in zip(readings, op_calls, strict=True):
        found = applied(name, args, reading)
        if name == "causal_mixing":
            bias_N = args[2]
            found = found[:, :, 0] + (0 if bias_N is None else bias_N[:LENGTH, None])
        torch.testing.assert_close(found, result, rtol=1e-12, atol=1e-12)


def test_shares_sum_to_one_where_anything_is_read(make_model: MakeModel) -> None:
    for reading in readings_of(make_model(), random_ids(2, LENGTH)):
        if not reading.is_share:
            continue
        total_BHT = reading.weights_BHTS.sum(-1)
        for term in (reading.own_BHT, reading.null_BHT):
            total_BHT = total_BHT if term is None else total_BHT + term
        reads_nothing = torch.arange(LENGTH) < (reading.nearest if reading.null_BHT is None else 0)
        torch.testing.assert_close(total_BHT, (~reads_nothing).double().expand_as(total_BHT), rtol=0, atol=1e-12)
        assert (reading.weights_BHTS >= 0).all()


def test_weights_are_zero_outside_what_is_said_to_be_read(make_model: MakeModel) -> None:
    place = torch.arange(LENGTH)
    distance = place[:, None] - place[None]
    for reading in readings_of(make_model(), random_ids(2, LENGTH)):
        is_read = distance >= reading.nearest
        if reading.farthest is not None:
            is_read &= distance <= reading.farthest
        assert (reading.weights_BHTS[..., ~is_read] == 0).all()
        assert (reading.weights_BHTS[..., is_read] != 0).all()
        assert reading.meaning.endswith(".")


def test_padding_is_not_read_and_changes_no_weight(make_model: MakeModel) -> None:
    model, ids = make_model(), random_ids(1, LENGTH)
    padded = torch.cat([torch.full((1, 3), 1), ids], dim=1)
    mask = torch.ones_like(padded)
    mask[:, :3] = 0
    for alone, beside in zip(readings_of(model, ids), readings_of(model, padded, attention_mask=mask), strict=True):
        assert (beside.weights_BHTS[..., 3:, :3] == 0).all()
        torch.testing.assert_close(beside.weights_BHTS[..., 3:, 3:], alone.weights_BHTS, rtol=1e-9, atol=1e-12)


def test_packed_texts_do_not_read_each_other(make_model: MakeModel, packs: bool) -> None:
    if not packs:
        return
    model, ids = make_model(), random_ids(1, LENGTH)
    documents = (torch.arange(LENGTH) >= 9).long()[None]
    separate = readings_of(model, ids[:, 9:])
    for alone, packed in zip(separate, readings_of(model, ids, document_ids=documents), strict=True):
        assert (packed.weights_BHTS[..., 9:, :9] == 0).all()
        torch.testing.assert_close(packed.weights_BHTS[..., 9:, 9:], alone.weights_BHTS, rtol=1e-9, atol=1e-12)


def test_nothing_is_left_behind(make_model: MakeModel) -> None:
    model, ids = make_model(), random_ids(1, 5)
    with record_readings(model.model.layers) as found:
        pass
    model(ids)
    assert found == []
