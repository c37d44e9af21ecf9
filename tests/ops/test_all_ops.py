"""Laws of every op: precision, no tokens, slices, pieces, padding, graphs, second derivatives, default dtypes."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from multilin import ops as packages
from multilin.layers.base import Layout
from multilin.layers.short_convolution import ShortConvolution
from multilin.ops.dispatch import all_ops
from multilin.ops.linear_recurrence import linear_recurrence_weights
from multilin.ops.prefix_softmax import prefix_softmax_weights
from multilin.ops.softmax import softmax
from multilin.ops.windowed_attention import windowed_attention_weights
from tests.ops import checked as ops
from tests.ops.comparing import TOLERANCE, check_compiled, check_near, tensors_of, with_gradients

H, D = 2, 8
Draw = Callable[..., Tensor]


def ramp(size: int) -> Tensor:
    """Weights from -1 to 1, in float32 whatever the default is."""
    return torch.linspace(-1, 1, size, dtype=torch.float32)


def _loss(draw: Draw, **options: Any) -> Tensor:
    hidden = draw(D).flatten(0, 1)
    return ops.token_cross_entropy(
        hidden, torch.ones(5, D).to(hidden), None, torch.zeros(len(hidden), dtype=torch.long)
    )


def _sum(draw: Draw, **options: Any) -> Tensor:
    hidden = draw(D).flatten(0, 1)
    weight = ramp(5 * D).view(5, D).to(hidden)
    return ops.linear_cross_entropy(hidden, weight, None, torch.arange(len(hidden)) % 5)


def _memory(draw: Draw, **options: Any) -> Any:
    q, k, v, decays, rates = draw(H, D), draw(H, D), draw(H, 4), -draw(H).abs(), draw(H).sigmoid()
    q, k = (normalize(x, dim=-1) for x in (q, k))
    return ops.delta_rule(q, k, v, log_decays=decays, rates=rates, **options)


def _prefix(draw: Draw, *, has_own: bool = False, **options: Any) -> Any:
    return ops.prefix_softmax(draw(H), draw(H, D), own_logits=draw(H) if has_own else None, **options)


def _window(draw: Draw, **options: Any) -> Any:
    return ops.windowed_attention(draw(H, D), draw(H, D), draw(H, 4), **options)


def _int8(draw: Draw, backward: str = "float", **options: Any) -> Tensor:
    x = draw(D)
    return ops.int8_linear(x, ramp(6 * D).view(6, D).to(x), backward=backward)


def _pairs(draw: Draw, op: str, width: int) -> Tensor:
    left, right = draw(2, 4), draw(2, width)
    weight = ramp(6 * 8 * width).view(6, 2, 4, width).to(left)
    return getattr(ops, op)(left, right, weight)


READING: dict[str, Callable[..., Any]] = {
    "causal_mixing": lambda draw, **options: ops.causal_mixing(draw(D), ramp(78), ramp(12), **options),
    "delta_rule": _memory,
    "linear_recurrence": lambda draw, **options: ops.linear_recurrence(draw(2, D), **options),
    "prefix_softmax": _prefix,
    "prefix_softmax, own": lambda draw, **options: _prefix(draw, has_own=True, **options),
    "prefix_softmax, window": lambda draw, **options: _prefix(draw, window=3, **options),
    "windowed_attention": lambda draw, **options: _window(draw, window=3, **options),
    "windowed_attention, itself": lambda draw, **options: _window(draw, window=0, null_key=True, **options),
    "windowed_attention, one before": lambda draw, **options: _window(draw, window=1, **options),
}
"""Ops that read a text with a state, as functions of draw(*shape of a token), which makes inputs (B, T, *shape)."""

CALLS: dict[str, Callable[..., Any]] = {
    **READING,
    "block_outer": lambda draw, **options: _pairs(draw, "block_outer", 4),
    "block_outer, no vectors": lambda draw, **options: _pairs(draw, "block_outer", 5),
    "int8": _int8,
    "int8, pairs": lambda draw, **options: _pairs(draw, "int8_block_outer", 4),
    "linear_cross_entropy": _loss,
    "linear_cross_entropy, sum": _sum,
    "rotary": lambda draw, **options: ops.rotary(draw(H, D), draw(D // 2), draw(D // 2), block=4),
    "tile_norm": lambda draw, **options: ops.tile_norm(draw(D)),
}
every_call, every_reading = (pytest.mark.parametrize("name", calls) for calls in (CALLS, READING))


def of_shape(num_texts: int, num_tokens: int) -> Draw:
    return lambda *shape: torch.randn(num_texts, num_tokens, *shape, requires_grad=True)


def inputs_of(name: str, num_texts: int = 2, num_tokens: int = 12) -> list[Tensor]:
    """What a call draws."""
    drawn: list[Tensor] = []

    def draw(*shape: int) -> Tensor:
        drawn.append(torch.randn(num_texts, num_tokens, *shape))
        return drawn[-1]

    torch.manual_seed(0)
    CALLS[name](draw)
    return drawn


def calling(name: str, **options: Any) -> Callable[..., Any]:
    """The call as a function of what it draws."""

    def compute(*inputs: Tensor) -> Any:
        left = iter(inputs)
        return CALLS[name](lambda *shape: next(left), **options)

    return compute


def state_of(result: Any) -> Any:
    return result[1] if isinstance(result, tuple) else None


@pytest.fixture(params=[torch.float32, torch.float64])
def default_dtype(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(before)


def test_every_op_is_called() -> None:
    whole_numbers = {"longest_match"}  # reads and returns ids only; tests/ops/test_longest_match.py
    assert {name.split(",")[0] for name in CALLS} - {"rotary"} == all_ops().keys() - whole_numbers


@pytest.mark.usefixtures("default_dtype")
@every_call
@pytest.mark.parametrize(("num_texts", "num_tokens"), [(2, 0), (0, 3), (0, 0)])
def test_the_result_of_no_tokens_is_as_empty_and_the_state_as_of_others(
    name: str, num_texts: int, num_tokens: int
) -> None:
    result, others = (CALLS[name](of_shape(*shape)) for shape in ((num_texts, num_tokens), (2, 3)))
    if isinstance(result, tuple):
        (result, state), (others, after) = result, others
        assert [(x.shape[1:], x.dtype) for x in state] == [(x.shape[1:], x.dtype) for x in after]
        assert {len(x) for x in state} == {num_texts}
    assert result.ndim == 0 or result.numel() == 0
    assert (result.shape[-1:], result.dtype) == (others.shape[-1:] if result.ndim > 1 else result.shape, others.dtype)
    if result.requires_grad:
        result.sum().backward()


@pytest.mark.usefixtures("default_dtype")
@every_reading
def test_without_tokens_a_state_stays_as_it_is(name: str) -> None:
    torch.manual_seed(0)
    _, before = CALLS[name](of_shape(2, 3))
    _, after = CALLS[name](of_shape(2, 0), state=before)
    torch.testing.assert_close(tuple(after), tuple(before), rtol=0, atol=0)
    results = []
    for state in (None, CALLS[name](of_shape(2, 0))[1]):
        torch.manual_seed(1)
        results.append(CALLS[name](of_shape(2, 2), state=state)[0])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


@pytest.mark.quick
@every_reading
def test_reading_in_pieces_is_reading_at_once_and_no_state_is_made_unasked(name: str) -> None:
    inputs, state, pieces = [x.double() for x in inputs_of(name)], None, []
    whole, after = calling(name)(*inputs)
    for piece in (slice(0, 1), slice(1, 7), slice(7, 12)):
        result, state = calling(name, state=state)(*(x[:, piece] for x in inputs))
        pieces.append(result)
        assert [x.shape for x in state] == [x.shape for x in after]  # from the first call on
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(tuple(state), tuple(after), rtol=1e-9, atol=1e-9)
    assert state_of(calling(name, needs_state=False)(*inputs)) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["causal_mixing", "linear_recurrence"])
def test_what_stands_in_padding_changes_nothing(name: str, dtype: torch.dtype) -> None:
    padding = torch.zeros(2, 12, dtype=torch.bool)
    padding[0, :3] = padding[1, 5:7] = True

    def fill(x: Tensor, number: float) -> Tensor:
        return x.masked_fill(padding.view(2, 12, *[1] * (x.ndim - 2)), number)

    def read(*inputs: Tensor) -> Any:
        result, state = calling(name, padding=padding)(*inputs)
        return fill(result, 0.0), state

    results = []
    for number in (0.0, torch.nan, torch.inf, 1e30):
        *found, gradients = with_gradients(read, [fill(x, number) for x in inputs_of(name)], dtype)
        results.append([*found, fill(gradients, 0.0)])
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=0)


@pytest.mark.quick
@every_call
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_precision_against_float64(name: str, dtype: torch.dtype) -> None:
    if name.startswith(("int8", "delta_rule")):
        pytest.skip("its own tests know how it rounds")
    inputs = [x.to(dtype) for x in inputs_of(name, 3, 11)]
    found, exact = (with_gradients(calling(name), inputs, kind) for kind in (dtype, torch.float64))
    assert found[0].dtype in (dtype, torch.float32)
    check_near(found, exact, TOLERANCE[dtype])


@pytest.mark.parametrize("name", [name for name in CALLS if not name.startswith("int8") and CALLS[name] != _loss])
def test_gradients_by_finite_differences(name: str) -> None:
    def finite(*inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(x for x in tensors_of(calling(name)(*inputs)) if x.requires_grad and x.isfinite().all())

    inputs = [x.double().requires_grad_() for x in inputs_of(name, 2, 5)]
    assert torch.autograd.gradcheck(finite, inputs, fast_mode=True)


@every_call
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_slices_and_slanted_tensors_give_what_copies_give(name: str, dtype: torch.dtype) -> None:
    inputs = [x.to(dtype) for x in inputs_of(name)]
    expected = with_gradients(calling(name), inputs)
    wide = [torch.cat([x, x], dim=-1)[..., : x.shape[-1]] for x in inputs]
    slanted = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in inputs]
    for others in (wide, slanted):
        needed = [x.requires_grad_() for x in others]
        found = tensors_of(calling(name)(*needed))
        torch.testing.assert_close(found, expected[: len(found)])
        (found[0] if found[0].requires_grad else needed[0]).sum().backward()  # one number, seen everywhere


@every_call
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_is_eager(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    if name.startswith("int8") and dtype == torch.bfloat16:
        pytest.skip("graphs round the float32 products of pairs, kernels these of bf16")
    inputs = [x.to(dtype) for x in inputs_of(name)]
    names = {n: getattr(getattr(packages, MODULES.get(n, n)), n) for n in vars(ops) if n in MODULES}
    monkeypatch.setitem(globals(), "ops", SimpleNamespace(**names))
    check_compiled(calling(name), *inputs)


MODULES = {
    **{op: op for op in [*all_ops(), "rotary"]},
    "token_cross_entropy": "linear_cross_entropy", "int8_linear": "int8", "int8_block_outer": "int8",
}  # fmt: skip


@every_call
def test_the_default_dtype_of_torch_changes_nothing(name: str) -> None:
    inputs = inputs_of(name)
    expected, before = with_gradients(calling(name), inputs), torch.get_default_dtype()
    for default in (torch.float64, torch.bfloat16):
        torch.set_default_dtype(default)
        try:
            found = with_gradients(calling(name), inputs)
        finally:
            torch.set_default_dtype(before)
        assert [x.dtype for x in found] == [x.dtype for x in expected]
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def _short_convolution() -> Tensor:
    layer = ShortConvolution(6)
    layer.initialize(0.1)
    layout = Layout(torch.arange(20)[None], None, None, needs_state=False)
    return layer(of_shape(1, 20)(6), None, layout)[0]


ONCE: dict[str, Callable[[], Any]] = {
    name: lambda name=name: CALLS[name](of_shape(1, 20))
    for name in CALLS
    if name.split(",")[0] in ("prefix_softmax", "block_outer", "delta_rule", "int8") or name == "windowed_attention"
} | {
    "linear_cross_entropy": lambda: _sum(of_shape(1, 20)),
    "softmax": lambda: softmax(of_shape(3, 4)()),
    "short_convolution": _short_convolution,
}


@pytest.mark.parametrize("name", ONCE)
def test_a_graph_of_the_gradient_is_refused(name: str) -> None:
    """The part would be left out silently: where only inputs are asked for, autograd does not reach the op again."""
    torch.manual_seed(0)
    result = tensors_of(ONCE[name]())[0]
    with pytest.raises(RuntimeError, match="second derivatives are not supported"):
        result.square().sum().backward(create_graph=True)


def test_weights_of_no_tokens_are_none() -> None:
    none = of_shape(2, 0)
    assert ops.delta_rule_weights(none(H, D), none(H, D)).shape == (2, H, 0, 0)
    assert windowed_attention_weights(none(H, D), none(H, D), window=3).shape == (2, H, 0, 0)
    assert prefix_softmax_weights(none(H))[0].shape == (2, H, 0, 0)
    assert [x.shape for x in linear_recurrence_weights(none(2, D))] == [(2, 0, 0), (2, 0)]
