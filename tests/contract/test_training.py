"""Training: gradients, precision, checkpointing, compilation, the loss, and that a model can learn."""

import pytest
import torch

from multilin.layers import Layout
from tests.contract.conftest import MakeModel, random_ids, without_dropout


def loss_and_gradients(model, ids: torch.Tensor, **arguments) -> list[torch.Tensor]:
    loss = model(ids, labels=ids, **arguments).loss
    return [loss, *torch.autograd.grad(loss, trainable(model), materialize_grads=True)]


def trainable(model) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def learn_by_heart(model, ids: torch.Tensor, *, num_steps: int, goal: float) -> None:
    """Train until the loss of these tokens is below the goal, which some step has to reach."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(num_steps):
        loss = model(ids, labels=ids).loss
        if loss < goal:
            return
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    pytest.fail(f"the loss is still {loss:.3f}, not below {goal:.3f}")


@pytest.mark.slow_for_variants
def test_gradients_by_finite_differences(make_model: MakeModel) -> None:
    model, ids = make_model(), random_ids(1, 12)
    names = [name for name, _ in model.named_parameters()]

    def loss(*parameters: torch.Tensor) -> torch.Tensor:
        values = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(model, values, (ids,), {"labels": ids}).loss

    assert torch.autograd.gradcheck(loss, tuple(model.parameters()), fast_mode=True)


def test_no_state_is_built_where_none_is_needed(make_model: MakeModel) -> None:
    model, length = make_model(), 7
    x_BTD = torch.randn(1, length, model.config.hidden_size, dtype=torch.float64)
    for layer in model.model.layers:
        x_BTD, state = layer(x_BTD, None, Layout(torch.arange(length)[None], needs_state=False))
        assert state is None


@pytest.mark.slow_for_variants
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64], ids=str)
def test_the_default_dtype_changes_nothing(make_model: MakeModel, default: torch.dtype) -> None:
    ids = random_ids(2, 40)
    for dtype in (torch.float32, torch.bfloat16):
        model = without_dropout(make_model(dtype))
        expected = loss_and_gradients(model, ids)
        torch.set_default_dtype(default)
        try:
            found = loss_and_gradients(model, ids)
        finally:
            torch.set_default_dtype(torch.float32)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_the_chunked_loss_is_that_of_the_logits(make_model: MakeModel) -> None:
    model, ids = make_model(), random_ids(2, 30)
    labels = ids.clone()
    labels[0, :9] = -100
    result = model(ids, labels=labels)
    expected = torch.nn.functional.cross_entropy(result.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(result.loss, expected)
    torch.testing.assert_close(model(ids, labels=labels, num_items_in_batch=7).loss, expected * (58 - 8) / 7)
    assert model.train()(ids, labels=labels).logits is None


def test_label_smoothing_is_for_training_only(make_model: MakeModel) -> None:
    model, smooth = make_model(), make_model(label_smoothing=0.1)
    ids = random_ids(2, 30)
    torch.testing.assert_close(smooth(ids, labels=ids).loss, model(ids, labels=ids).loss)
    expected = torch.nn.functional.cross_entropy(
        model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), label_smoothing=0.1
    )
    torch.testing.assert_close(without_dropout(smooth)(ids, labels=ids).loss, expected)


def test_gradient_checkpointing_changes_nothing(make_model: MakeModel) -> None:
    model, ids = without_dropout(make_model()), random_ids(2, 30)
    plain = loss_and_gradients(model, ids)
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    for expected, result in zip(plain, loss_and_gradients(model, ids), strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.slow_for_variants
def test_bf16_autocast_errs_no_more_than_bf16_weights(make_model: MakeModel) -> None:
    """The yardstick is what rounding the weights alone does, since some models amplify any rounding.

    Many tokens, since with few of them a single ReLU that rounding switches decides.
    """
    model, ids = make_model(torch.float32, initializer_range=0.1), random_ids(48, 40)
    exact = loss_and_gradients(model, ids)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        autocast = loss_and_gradients(model, ids)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    rounded = loss_and_gradients(model, ids)
    assert (autocast[0] - exact[0]).abs() <= 4e-3 * exact[0].abs()

    def error(results: list[torch.Tensor]) -> float:
        return sum(float((x - y).square().sum()) for x, y in zip(results[1:], exact[1:], strict=True)) ** 0.5

    assert error(autocast) <= 3 * error(rounded)


@pytest.mark.slow
def test_compiled_is_eager(make_model: MakeModel) -> None:
    torch.compiler.reset()
    model, ids = make_model(), random_ids(2, 40)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(
            compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits, rtol=1e-10, atol=1e-10
        )


@pytest.mark.slow_for_variants
def test_64_tokens_are_learned_by_heart(make_model: MakeModel) -> None:
    model = without_dropout(make_model(torch.float32, initial=True))
    learn_by_heart(model, random_ids(1, 64), num_steps=300, goal=0.05)


def test_a_weight_that_is_nan_is_seen_in_float32_as_in_float64(make_model: MakeModel) -> None:
    """Training stops at a loss that is not finite, so no kernel may make a number of NaN."""
    models, ids = [make_model(torch.float64), make_model(torch.float32)], random_ids(1, 40)
    for name, _ in models[0].named_parameters():
        losses = []
        for model in models:
            parameter = model.get_parameter(name)
            with torch.no_grad():
                kept = parameter.flatten()[0].clone()
                parameter.view(-1)[0] = torch.nan
                losses.append(model(ids, labels=ids).loss)
                parameter.view(-1)[0] = kept
        assert losses[1].isnan() >= losses[0].isnan(), name
