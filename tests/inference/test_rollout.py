"""compose and rollout against the model itself and against the recurrence."""

import pytest
import torch

from multilin.errors import InputError
from multilin.inference.rollout import compose, rollout, rollout_sequential
from multilin.layers.linear import Arithmetic
from multilin.model import MultilinConfig, MultilinForCausalLM

VOCAB_SIZE, CONTEXT = 29, 19
EXACT = {"rtol": 1e-10, "atol": 1e-10}

VARIANTS = {
    "default": {},
    "biases": {"mixing_bias": True},
    "feed-forward": {"mixing_bias": True, "feed_forward": "linear"},
    "no residual": {"residual": False, "feed_forward": "linear"},
}


def make_model(options: dict, num_layers: int = 2, **model: object) -> MultilinForCausalLM:
    config = MultilinConfig.from_architecture(
        "linear_mixer", hidden_size=7, num_layers=num_layers, vocab_size=VOCAB_SIZE, n_positions=CONTEXT,
        options=options, initializer_range=0.3, **model,
    )  # fmt: skip
    torch.manual_seed(0)
    result = MultilinForCausalLM(config).double().eval()
    with torch.no_grad():
        for name, parameter in result.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter)
    return result


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(0, VOCAB_SIZE, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_composed_logits_are_the_models(options: dict, num_layers: int) -> None:
    model = make_model(options, num_layers, output_bias="learned", final_scale=0.7)
    composed = compose(model)
    assert (composed.mixing.triu(1) == 0).all()
    for length in (CONTEXT, 4):
        torch.testing.assert_close(composed.logits(ids(2, length)), model(ids(2, length)).logits, **EXACT)


@pytest.mark.parametrize(("num_prompt", "num_steps"), [(1, CONTEXT), (3, 8), (CONTEXT, 1), (1, 1)])
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_rollout_is_the_recurrence(options: dict, num_prompt: int, num_steps: int) -> None:
    model, prompt = (
        make_model(options, output_bias="learned" if options else "none", final_scale=0.7),
        ids(2, num_prompt),
    )
    result = rollout(model, prompt, num_steps)
    assert result.shape == (2, num_steps, VOCAB_SIZE)
    inputs = torch.nn.functional.one_hot(prompt, VOCAB_SIZE).double()
    tokens, mixing, bias = compose(model)
    for _ in range(num_steps):
        last = inputs.shape[1] - 1
        output = tokens @ (mixing[last, : last + 1] @ inputs)[..., None]
        inputs = torch.cat([inputs, (output[..., 0] + bias[last])[:, None]], dim=1)
    expected = inputs[:, num_prompt:]
    assert ((result - expected).norm(dim=-1) <= 1e-10 * expected.norm(dim=-1)).all()
    sequential = rollout_sequential(model, prompt, num_steps)
    assert ((sequential - expected).norm(dim=-1) <= 1e-10 * expected.norm(dim=-1)).all()


def test_long_rollouts_neither_vanish_nor_explode_on_the_way() -> None:
    """Q of size 1e40 with weights of size 1e-40: the powers of Q alone overflow float64."""
    model = make_model({"residual": False}, num_layers=1)
    model.config.final_scale = 1e40
    with torch.no_grad():
        model.model.layers[0].mixing.triangle.weight.mul_(1e-40)
    result, expected = rollout(model, ids(1, 1), CONTEXT), rollout_sequential(model, ids(1, 1), CONTEXT)
    assert torch.isfinite(result).all()
    assert ((result - expected).norm(dim=-1) <= 1e-10 * expected.norm(dim=-1)).all()


@pytest.mark.parametrize(
    "options", [{"mixing": "relu"}, {"mixing": "gelu"}, {"feed_forward": "gelu"}, {"norm": True}], ids=str
)
def test_nonlinear_models_are_refused(options: dict) -> None:
    model = make_model(options)
    for function in (compose, lambda m: rollout(m, ids(1, 2), 3), lambda m: rollout_sequential(m, ids(1, 2), 3)):
        with pytest.raises(InputError, match="to be a linear map"):
            function(model)


def test_int8_products_are_not_linear_but_rounded_weights_are() -> None:
    model, text = make_model({"feed_forward": "linear"}), ids(2, 5)
    model.set_arithmetic(Arithmetic(weights="sim_4bit"))
    torch.testing.assert_close(rollout(model, text, 9), rollout_sequential(model, text, 9), **EXACT)
    model.set_arithmetic(Arithmetic(products="int8"))
    for function in (compose, lambda m: rollout(m, text, 3), lambda m: rollout_sequential(m, text, 3)):
        with pytest.raises(InputError, match=r"layers.0: int8 products round"):
            function(model)


def test_mistakes_are_named() -> None:
    with pytest.raises(InputError, match="final_norm: 'layer_norm' given"):
        compose(make_model({}, final_norm="layer_norm"))
    other = MultilinConfig.from_architecture(
        "elita", hidden_size=8, num_layers=1, vocab_size=VOCAB_SIZE, final_norm="none"
    )
    with pytest.raises(InputError, match="only linear layers"):
        compose(MultilinForCausalLM(other))
    model = make_model({})
    for run in (rollout, rollout_sequential):
        with pytest.raises(InputError, match="prompt: shape"):
            run(model, ids(1, 0), 3)
        with pytest.raises(InputError, match=r"input_ids: \[\[1, 2\]\] given, but it must be a tensor \(B, T\)"):
            run(model, [[1, 2]], 3)
        with pytest.raises(InputError, match="num_steps: 0"):
            run(model, ids(1, 2), 0)
        for token in (-1, VOCAB_SIZE):
            with pytest.raises(InputError, match=f"input_ids: {token} given, but ids are 0 to {VOCAB_SIZE - 1}"):
                run(model, torch.tensor([[0, token]]), 3)
            with pytest.raises(InputError, match=f"input_ids: {token} given, but ids are 0 to {VOCAB_SIZE - 1}"):
                compose(model).logits(torch.tensor([[0, token]]))
        with pytest.raises(InputError, match=r"num_steps: 19 given after a text of 2 tokens, .* so at most 18 can"):
            run(model, ids(1, 2), 19)
    with pytest.raises(InputError, match="n_positions: none given"):
        MultilinConfig.from_architecture("linear_mixer", hidden_size=8, num_layers=1, vocab_size=5)
