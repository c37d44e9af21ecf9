"""delta_rule: the definition against matrices, the chunks against the definition and transformers', and the laws."""

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from multilin.errors import InputError
from multilin.ops import delta_rule as unchecked
from multilin.ops.delta_rule import DeltaRuleState, portable, reference
from tests.ops.cases.delta_rule import SWITCHES, Inputs, make_inputs
from tests.ops.cases.prefix_softmax import make_starts
from tests.ops.checked import delta_rule, delta_rule_weights
from tests.ops.comparing import LargestTensor, check_near, with_gradients
from tests.qwen3_next import in_float64

B, T, H, D, E = 2, 141, 2, 3, 5
EXACT = {"rtol": 1e-10, "atol": 1e-10}
every_switch = pytest.mark.parametrize("name", SWITCHES)


def call(inputs: Inputs, **options: Any) -> tuple[Tensor, DeltaRuleState | None]:
    return delta_rule(
        inputs.queries, inputs.keys, inputs.values, log_decays=inputs.log_decays, rates=inputs.rates,
        **({"state": DeltaRuleState(inputs.memory)} | options),
    )  # fmt: skip


def compute(*inputs: Tensor | None) -> tuple[Tensor, DeltaRuleState | None]:
    return call(Inputs(*inputs))


@every_switch
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("length", [3, 70])
def test_it_is_the_equation_of_the_paper(name: str, packed: bool, length: int) -> None:
    """S_t = a_t S_(t-1) (1 - b_t k_t k_t^T) + b_t v_t k_t^T with padding and starts, as matrices of one head."""
    inputs = make_inputs(name, 1, length, 1, D, E)
    starts, padding = (make_starts((1, length)) if packed else None), torch.arange(length)[None] % 7 == 2
    matrix, expected = inputs.memory[0, 0].T, []
    for t in range(length):
        k, v, q = inputs.keys[0, t, 0], inputs.values[0, t, 0], inputs.queries[0, t, 0]
        if starts is not None and starts[0, t]:
            matrix = torch.zeros_like(matrix)
        if not padding[0, t]:
            decay = 1.0 if inputs.log_decays is None else inputs.log_decays[0, t, 0].exp()
            if inputs.rates is None:
                matrix = decay * matrix + torch.outer(v, k)
            else:
                b = inputs.rates[0, t, 0]
                matrix = decay * matrix @ (torch.eye(D) - b * torch.outer(k, k)) + b * torch.outer(v, k)
        expected.append(matrix @ q)
    read, state = call(inputs, starts=starts, padding=padding)
    torch.testing.assert_close(read[0, :, 0], torch.stack(expected), **EXACT)
    torch.testing.assert_close(state.memory_BHDE[0, 0], matrix.T, **EXACT)


@every_switch
@pytest.mark.parametrize("length", [5, 64, T])
@pytest.mark.parametrize("numbers", [1, portable.NUMBERS["cpu"]])
def test_chunks_equal_the_definition(monkeypatch, name: str, length: int, numbers: int) -> None:
    """What is read, the memory, and all gradients, however the text is cut."""
    monkeypatch.setitem(portable.NUMBERS, "cpu", numbers)
    inputs = make_inputs(name, B, length, H, D, E)
    found, exact = (with_gradients(op.delta_rule, inputs) for op in (portable, reference))
    torch.testing.assert_close(found, exact, **EXACT)


@every_switch
@pytest.mark.parametrize("length", [5, 17, T])
@pytest.mark.parametrize("backend", [portable.delta_rule, partial(portable.delta_rule, kernels="cpu")])
@pytest.mark.usefixtures("poisoned")
def test_chunks_in_float32_equal_the_definition_in_float64(name: str, length: int, backend: Any) -> None:
    inputs = make_inputs(name, B, length, H, 16, 8).map(torch.Tensor.float)
    exact = with_gradients(reference.delta_rule, inputs, torch.float64)
    check_near(with_gradients(portable.delta_rule, inputs), exact, 2e-6)


@settings(max_examples=30, deadline=None)
@given(name=st.sampled_from(sorted(SWITCHES)), cuts=st.lists(st.integers(1, T - 1), max_size=4), packed=st.booleans())
def test_reading_in_pieces_equals_reading_at_once(name: str, cuts: list[int], packed: bool) -> None:
    inputs, starts = make_inputs(name, B, T, H, D, E), (make_starts((B, T), share=0.03) if packed else None)
    whole, end = call(inputs, starts=starts, state=None)
    state, pieces = None, []
    for first, last in itertools.pairwise([0, *sorted(set(cuts)), T]):
        piece = inputs.map_tokens(lambda x, first=first, last=last: x[:, first:last])
        read, state = call(piece, starts=None if starts is None else starts[:, first:last], state=state)
        pieces.append(read)
        assert state.memory_BHDE.shape == (B, H, D, E)
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, **EXACT)
    torch.testing.assert_close(state, end, **EXACT)


@every_switch
@pytest.mark.parametrize(("low", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-3)])
def test_precision_against_float64(name: str, low: torch.dtype, tolerance: float) -> None:
    inputs = make_inputs(name, B, 300, H, 16, 8).map(lambda x: x.to(low))
    exact = with_gradients(compute, inputs, torch.float64)
    with torch.autocast("cpu", torch.bfloat16, enabled=low == torch.bfloat16):
        found = with_gradients(compute, inputs)
    assert [x.dtype for x in found[:2]] == [low, torch.float32]
    check_near(found, exact, tolerance)


def test_one_large_decay_costs_the_others_no_digits() -> None:
    """Sums of logs in float32 would lose all that is behind the point."""
    inputs = make_inputs("gated delta rule", B, T, H, 16, 8)
    log_decays = -0.3 * torch.rand(B, T, H, dtype=torch.float64)
    for size in (1e3, 1e6, 1e30):
        log_decays[:, 10] = -size
        exact, _ = call(inputs._replace(log_decays=log_decays))
        low, _ = call(inputs._replace(log_decays=log_decays).map(torch.Tensor.float))
        assert (low - exact).norm() <= 1e-6 * exact.norm()


def test_the_future_changes_nothing_however_large() -> None:
    inputs = make_inputs("gated delta rule", B, T, H, D, E)
    whole, _ = call(inputs)
    for first in (1, 30, 100):
        extreme = Inputs(*(torch.cat([x[:, :first], 1e100 * x[:, first:]], dim=1) for x in inputs[:4]), *inputs[4:])
        read, _ = call(extreme._replace(keys=inputs.keys))
        torch.testing.assert_close(read[:, :first], whole[:, :first], **EXACT)


@every_switch
@pytest.mark.parametrize("length", [4, T])
def test_padding_changes_nothing_whatever_it_holds(name: str, length: int) -> None:
    inputs = make_inputs(name, 1, length, H, D, E)
    padding = torch.arange(length)[None] % 3 == 1
    filled = inputs.map_tokens(lambda x: torch.where(padding.view(1, length, *[1] * (x.ndim - 2)), torch.nan, x))
    read, state = call(filled, padding=padding)
    alone, end = call(inputs.map_tokens(lambda x: x[:, ~padding[0]]))
    torch.testing.assert_close(read[:, ~padding[0]], alone, **EXACT)
    torch.testing.assert_close(state, end, **EXACT)


@pytest.mark.parametrize("first", [3, 64, 100])
def test_packed_texts_are_separate_texts(first: int) -> None:
    inputs = make_inputs("gated delta rule", B, T, H, D, E)
    packed = inputs._replace(values=torch.cat([1e200 * inputs.values[:, :first], inputs.values[:, first:]], dim=1))
    read, state = call(packed, starts=(torch.arange(T) == first).expand(B, -1))
    alone, end = call(inputs.map_tokens(lambda x: x[:, first:]), state=None)
    torch.testing.assert_close(read[:, first:], alone, **EXACT)
    torch.testing.assert_close(state, end, **EXACT)


def test_at_rate_one_a_key_that_comes_again_replaces_what_it_stored() -> None:
    """As many pairs as a key has numbers are found exactly; without rates the values would add up."""
    keys = torch.eye(5, dtype=torch.float64)[[0, 1, 2, 3, 4, 1, 3, 1, 0]][None, :, None]
    values = torch.randn(1, 9, 1, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    read, state = delta_rule(keys, keys, values, rates=torch.ones(1, 9, 1, dtype=torch.float64))
    torch.testing.assert_close(read, values, **EXACT)
    torch.testing.assert_close(state.memory_BHDE[0, 0], values[0, [8, 7, 2, 6, 4], 0], **EXACT)
    added, _ = delta_rule(keys, keys, values)
    torch.testing.assert_close(added[0, 7], values[0, [1, 5, 7]].sum(dim=0), **EXACT)


@every_switch
@pytest.mark.parametrize("packed", [False, True])
def test_the_weights_applied_to_the_values_are_what_is_read(name: str, packed: bool) -> None:
    inputs, starts = make_inputs(name, B, T, H, D, E), (make_starts((B, T), share=0.03) if packed else None)
    options = {"log_decays": inputs.log_decays, "rates": inputs.rates, "starts": starts}
    weights_BHTS = delta_rule_weights(inputs.queries, inputs.keys, **options)
    read, _ = call(inputs, state=None, starts=starts)
    torch.testing.assert_close(torch.einsum("bhts,bshe->bthe", weights_BHTS, inputs.values), read, **EXACT)
    assert (weights_BHTS.triu(1) == 0).all()


@pytest.mark.parametrize("name", ["gated delta rule", "delta rule"])
@pytest.mark.parametrize("kind", ["chunk", "recurrent"])
def test_it_equals_that_of_transformers(monkeypatch: pytest.MonkeyPatch, name: str, kind: str) -> None:
    theirs = getattr(in_float64(monkeypatch), f"torch_{kind}_gated_delta_rule")
    inputs = make_inputs(name, B, T, H, D, E)
    if inputs.log_decays is None:  # which it has no word for
        log_decays = torch.zeros(B, T, H, dtype=torch.float64)
    else:
        log_decays = inputs.log_decays.clamp(min=-40.0)
    inputs = inputs._replace(log_decays=log_decays, queries=3 * inputs.queries, keys=2 * inputs.keys)
    expected, memory = theirs(
        inputs.queries, inputs.keys, inputs.values, g=log_decays, beta=inputs.rates, initial_state=inputs.memory,
        output_final_state=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    unit = [x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + 1e-6) for x in inputs[:2]]
    read, state = call(inputs._replace(queries=unit[0] * D**-0.5, keys=unit[1]))
    assert expected.dtype == torch.float64
    torch.testing.assert_close(read, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(state.memory_BHDE, memory, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("size", [1, 5, 64])
def test_a_system_solved_by_products_is_the_system_solved(size: int) -> None:
    """Also with equal keys at rate 1, where powers of the matrix would overflow."""
    generator = torch.Generator().manual_seed(0)
    draw = torch.rand(3, size, size, generator=generator, dtype=torch.float64)
    known = torch.randn(3, size, 4, generator=generator, dtype=torch.float64)
    for lower in (draw, torch.ones_like(draw), 2.0 * torch.ones_like(draw)):
        _, expected = portable.solve(lower, known.clone())
        torch.testing.assert_close(portable.invert(lower) @ known, expected, rtol=1e-9, atol=1e-9)


def test_no_tensor_on_the_way_grows_with_the_pairs_of_a_long_text(monkeypatch) -> None:
    monkeypatch.setitem(portable.NUMBERS, "cpu", 2**15)
    for length in (1024, 8192):
        inputs = make_inputs("gated delta rule", 1, length, 1, 8, 8).map(torch.Tensor.float)
        with torch.no_grad(), LargestTensor() as watch:
            call(inputs)
        assert watch.numbers <= max(2**15, 8 * length)


def test_gradients_of_keys_that_are_nearly_equal_stay_exact() -> None:
    """The hardest systems: every token corrects what the one before wrote."""
    inputs = make_inputs("delta rule", 1, T, 1, 16, 4)
    keys = normalize(inputs.keys[:, :1] + 1e-3 * inputs.keys, dim=-1)
    inputs = inputs._replace(keys=keys, rates=torch.full_like(inputs.rates, 0.999))
    rounded = inputs.map(torch.Tensor.float)
    check_near(with_gradients(compute, rounded), with_gradients(compute, rounded, torch.float64), 1e-5)


def test_bad_input_is_named() -> None:
    x, a = torch.zeros(1, 2, 1, 3), torch.zeros(1, 2, 1)
    assert unchecked.delta_rule(x, x, x, needs_state=False)[1] is None
    with pytest.raises(InputError, match="keys: shape"):
        unchecked.delta_rule(x, x[:, :1], x)
    with pytest.raises(InputError, match=r"log_decays: shape \(1, 1, 1\) given, but it must be \(1, 2, 1\)"):
        unchecked.delta_rule(x, x, x, log_decays=a[:, :1])
    with pytest.raises(InputError, match="rates: shape"):
        unchecked.delta_rule(x, x, x, rates=a[0])
    with pytest.raises(InputError, match=r"state: shape \(1, 1, 2, 3\) given"):
        unchecked.delta_rule(x, x, x, state=DeltaRuleState(torch.zeros(1, 1, 2, 3)))
