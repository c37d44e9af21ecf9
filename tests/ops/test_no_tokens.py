"""Ops that are given no tokens, or no texts, return as many, and the state as it was."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from multilin.ops.dispatch import all_ops
from multilin.ops.linear_recurrence.reference import linear_recurrence_weights
from multilin.ops.prefix_softmax.reference import prefix_softmax_weights
from multilin.ops.windowed_attention.reference import windowed_attention_weights
from tests.ops import checked as ops

H, D = 2, 8
Draw = Callable[..., Tensor]


def _loss(draw: Draw, state: Any) -> Tensor:
    hidden = draw(D).flatten(0, 1)
    return ops.token_cross_entropy(hidden, torch.ones(5, D), None, torch.zeros(len(hidden), dtype=torch.long))


def _int8(draw: Draw, state: Any) -> Tensor:
    weight = torch.ones(6, D, requires_grad=True)
    return ops.int8_linear(draw(D), weight.to(torch.get_default_dtype()), backward="int8")


def _prefix(draw: Draw, state: Any, *, has_own: bool = False, **options: Any) -> Any:
    own = draw(H) if has_own else None
    return ops.prefix_softmax(draw(H), draw(H, D), own_logits=own, state=state, **options)


def _window(draw: Draw, state: Any, **options: Any) -> Any:
    return ops.windowed_attention(draw(H, D), draw(H, D), draw(H, 4), state=state, **options)


def _memory(draw: Draw, state: Any) -> Any:
    gates = {"log_decays": -draw(H).abs(), "rates": draw(H).sigmoid()}
    return ops.delta_rule(draw(H, D), draw(H, D), draw(H, 4), state=state, **gates)


CALLS: dict[str, Callable[[Draw, Any], Any]] = {
    "block_outer": lambda draw, state: ops.block_outer(draw(2, 4), draw(2, 4), torch.ones(6, 2, 4, 4)),
    "causal_mixing": lambda draw, state: ops.causal_mixing(draw(D), torch.ones(15), torch.ones(5), state=state),
    "delta_rule": _memory,
    "int8": _int8,
    "linear_cross_entropy": _loss,
    "linear_recurrence": lambda draw, state: ops.linear_recurrence(draw(2, D), state=state),
    "prefix_softmax": _prefix,
    "prefix_softmax, own": lambda draw, state: _prefix(draw, state, has_own=True),
    "prefix_softmax, window": lambda draw, state: _prefix(draw, state, window=3),
    "rotary": lambda draw, state: ops.rotary(draw(H, D), draw(D // 2), draw(D // 2), block=4),
    "tile_norm": lambda draw, state: ops.tile_norm(draw(D)),
    "windowed_attention": lambda draw, state: _window(draw, state, window=3),
    "windowed_attention, itself": lambda draw, state: _window(draw, state, window=0, null_key=True),
    "windowed_attention, one before": lambda draw, state: _window(draw, state, window=1),
}


def of_shape(num_texts: int, num_tokens: int) -> Draw:
    return lambda *shape: torch.randn(num_texts, num_tokens, *shape, requires_grad=True)


@pytest.fixture(params=[torch.float32, torch.float64], autouse=True)
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(("num_texts", "num_tokens"), [(2, 0), (0, 3), (0, 0)])
def test_the_result_is_as_empty_and_the_state_as_of_others(name: str, num_texts: int, num_tokens: int) -> None:
    torch.manual_seed(0)
    result, others = (CALLS[name](of_shape(*shape), None) for shape in ((num_texts, num_tokens), (2, 3)))
    state = None
    if isinstance(result, tuple):
        (result, state), (others, after) = result, others
        assert [(x.shape[1:], x.dtype) for x in state] == [(x.shape[1:], x.dtype) for x in after]
        assert {len(x) for x in state} == {num_texts}
    assert result.numel() == 0
    assert (result.shape[-1:], result.dtype) == (others.shape[-1:] if result.ndim > 1 else (0,), others.dtype)
    if result.requires_grad:
        result.sum().backward()


@pytest.mark.parametrize("name", CALLS)
def test_a_state_stays_as_it_is(name: str) -> None:
    torch.manual_seed(0)
    before = CALLS[name](of_shape(2, 3), None)
    if not isinstance(before, tuple):
        return
    _, after = CALLS[name](of_shape(2, 0), before[1])
    for one, two in zip(before[1], after, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)
    results = []
    for state in (None, CALLS[name](of_shape(2, 0), None)[1]):
        torch.manual_seed(1)
        results.append(CALLS[name](of_shape(2, 2), state)[0])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


def test_weights_of_no_tokens_are_none() -> None:
    none = of_shape(2, 0)
    assert ops.delta_rule_weights(none(H, D), none(H, D)).shape == (2, H, 0, 0)
    assert windowed_attention_weights(none(H, D), none(H, D), window=3).shape == (2, H, 0, 0)
    assert prefix_softmax_weights(none(H))[0].shape == (2, H, 0, 0)
    assert [x.shape for x in linear_recurrence_weights(none(2, D))] == [(2, 0, 0), (2, 0)]


def test_every_op_is_called() -> None:
    assert {name.split(",")[0] for name in CALLS} - {"rotary"} == all_ops().keys()
