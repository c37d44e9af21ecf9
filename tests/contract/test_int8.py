"""The contract of the layers when they multiply int8: causal, streamed, checkpointed, saved, trained."""

import pytest
import torch

from multilin import MultilinForCausalLM
from multilin.errors import InputError
from multilin.layers.linear import Arithmetic, matrix_modules
from tests.contract.conftest import MakeModel, random_ids, read_in_pieces, without_dropout
from tests.contract.test_training import learn_by_heart, loss_and_gradients

INT8 = Arithmetic(products="int8")
BOTH_WAYS = Arithmetic(products="int8", backward="int8")


def int8_model(make_model: MakeModel, arithmetic: Arithmetic = INT8, **arguments) -> MultilinForCausalLM:
    model = make_model(**arguments)
    model.set_arithmetic(arithmetic)
    return model


def multiplies(model: MultilinForCausalLM) -> bool:
    return any(True for _ in matrix_modules(model.model.layers))


def test_int8_is_near_the_floats_and_not_equal(make_model: MakeModel) -> None:
    model, ids = make_model(initializer_range=0.1), random_ids(2, 30)
    exact = model(ids).logits
    model.set_arithmetic(INT8)
    rounded = model(ids).logits
    assert torch.equal(rounded, exact) is not multiplies(model)
    assert (rounded - exact).norm() <= 0.25 * exact.norm()
    model.set_arithmetic(Arithmetic())
    assert torch.equal(model(ids).logits, exact)


def test_int8_streams_exactly(make_model: MakeModel) -> None:
    """Every token has its own scale, so what is read together changes nothing."""
    model, ids = int8_model(make_model), random_ids(2, 40)
    whole = model(ids).logits
    torch.testing.assert_close(read_in_pieces(model, ids, [1, 2, 19])[0], whole, rtol=1e-9, atol=1e-9)
    changed = ids.clone()
    changed[:, 30:] = random_ids(2, 10, seed=5)
    torch.testing.assert_close(model(changed).logits[:, :30], whole[:, :30], rtol=1e-9, atol=1e-9)


def test_int8_gradient_checkpointing_changes_nothing(make_model: MakeModel) -> None:
    model, ids = without_dropout(int8_model(make_model)), random_ids(2, 30)
    plain = loss_and_gradients(model, ids)
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    for expected, result in zip(plain, loss_and_gradients(model.train(), ids), strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-10)


def test_int8_weights_are_saved_and_loaded(make_model: MakeModel, tmp_path) -> None:
    model, ids = int8_model(make_model, dtype=torch.float32), random_ids(2, 30)
    expected = model(ids).logits
    model.set_arithmetic(Arithmetic(products="int8", stored_as_int8=True))
    torch.testing.assert_close(model(ids).logits, expected)
    model.save_pretrained(tmp_path)
    loaded = MultilinForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded(ids).logits, expected)
    for module in matrix_modules(loaded.model.layers):
        assert module.matrix().values.dtype == torch.int8
    if multiplies(model):
        with pytest.raises(InputError, match="stored_as_int8: False"):
            loaded.set_arithmetic(INT8)


@pytest.mark.slow_for_variants
@pytest.mark.parametrize("arithmetic", [BOTH_WAYS, Arithmetic(weights="sim_2bit")])
def test_64_tokens_are_learned_with_rounded_weights(make_model: MakeModel, arithmetic: Arithmetic) -> None:
    model = without_dropout(int8_model(make_model, arithmetic, dtype=torch.float32, initial=True))
    ids = random_ids(1, 64)
    torch.manual_seed(1)
    learn_by_heart(model, ids, num_steps=100, goal=0.3 * model(ids, labels=ids).loss.item())
