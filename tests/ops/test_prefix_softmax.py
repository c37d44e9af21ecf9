"""prefix_softmax: every backend against the definition, and the definition against loops and laws."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from multilin.errors import InputError
from multilin.ops import prefix_softmax as unchecked
from multilin.ops.prefix_softmax import PREFIX_SOFTMAX, portable, reference
from tests.ops.cases.prefix_softmax import LOGITS, WINDOWS, make_logits, make_starts, make_values
from tests.ops.checked import prefix_softmax

B, T, H, D = 2, 67, 3, 5
# Those that compute in float64, which tells a wrong formula from rounding; others have tests of their own.
FAST = [b for b in PREFIX_SOFTMAX.backends if b.dtypes is None and b.compute is not reference.prefix_softmax]


def by_loops(
    logits: Tensor, values: Tensor, window: int | None, starts: Tensor | None, null: float | None, own: Tensor | None
) -> Tensor:
    """The equation with Python loops and exact rational order: the second source of the definition."""
    means = torch.zeros_like(values)
    for b, t, h in itertools.product(*map(range, logits.shape)):
        first = 0 if window is None else max(0, t - window + 1)
        if starts is not None:
            first = max([first, *(s for s in range(t + 1) if starts[b, s])])
        read = [(float(logits[b, j, h]), values[b, j, h]) for j in range(first, t + 1) if logits[b, j, h] > -math.inf]
        if own is not None:
            read.append((float(own[b, t, h]), values[b, t, h]))
        if null is not None:
            read.append((null, torch.zeros_like(values[b, t, h])))
        top = max((logit for logit, _ in read), default=0.0)
        total = math.fsum(math.exp(logit - top) for logit, _ in read)
        for logit, value in read:
            means[b, t, h] += math.exp(logit - top) / total * value
    return means


def relative_error(result: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm, which below 1e-12 counts as 1e-12: float32 has no 1e-60."""
    result, expected = result.detach().double(), expected.detach().double()
    return float((result - expected).norm() / expected.norm().clamp(min=1e-12))


@pytest.mark.parametrize("window", [None, 1, 4, 40])
@pytest.mark.parametrize("more", [None, "null", "own"])
@pytest.mark.parametrize("packed", [False, True])
def test_the_definition_is_the_equation(window: int | None, more: str | None, packed: bool) -> None:
    if window is not None and more == "own":
        return  # refused
    logits, values = make_logits("masked", (1, 23, 2)), make_values((1, 23, 2, 3))
    starts = make_starts((1, 23)) if packed else None
    own, null = make_logits("peaked", (1, 23, 2), seed=5) if more == "own" else None, -1.0 if more == "null" else None
    means, _ = reference.prefix_softmax(logits, values, window=window, own_logits=own, null_logit=null, starts=starts)
    torch.testing.assert_close(means, by_loops(logits, values, window, starts, null, own), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", FAST, ids=lambda backend: backend.name.split()[0])
@pytest.mark.parametrize("window", [*WINDOWS[:-1], 100, pytest.param(WINDOWS[-1], marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", LOGITS)
def test_a_backend_equals_the_definition(backend, name: str, window: int | None) -> None:
    """Means, state and all gradients, from a state, with text starts; float64 tells a wrong formula from rounding."""
    earlier = reference.prefix_softmax(make_logits("random", (B, 9, H)), make_values((B, 9, H, D)), window=window)[1]
    for starts, null, has_own in [(None, None, False), (make_starts((B, T)), 0.3, False), (None, None, window is None)]:
        results = []
        for compute in (reference.prefix_softmax, backend.compute):
            inputs = [make_logits(name, (B, T, H)), make_values((B, T, H, D)), *earlier]
            inputs = [x.clone().requires_grad_() for x in (*inputs, make_logits("masked", (B, T, H), seed=6))]
            state, own = type(earlier)(*inputs[2:4]), inputs[4] if has_own else None
            means, after = compute(
                *inputs[:2], window=window, own_logits=own, null_logit=null, state=state, starts=starts
            )
            weight = make_values((B, T, H, D), seed=7)
            loss = (means * weight).sum() + after.values_BSHD.sin().sum()
            loss = loss + after.logits_BSH.masked_fill(after.logits_BSH == -torch.inf, 0.0).sin().sum()
            gradients = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
            results.append([means, *after, *gradients])
        for expected, result in zip(*results, strict=True):
            torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-10)


@settings(max_examples=60, deadline=None)
@given(
    window=st.one_of(st.none(), st.integers(1, 60)),
    cuts=st.lists(st.integers(0, 50), max_size=4),
    name=st.sampled_from(sorted(LOGITS)),
    packed=st.booleans(),
)
def test_reading_in_pieces_equals_reading_at_once(window, cuts, name, packed) -> None:
    logits, values = make_logits(name, (B, 50, H)), make_values((B, 50, H, D))
    starts = make_starts((B, 50)) if packed else None
    whole, final = prefix_softmax(logits, values, window=window, starts=starts)
    state, pieces = None, []
    for first, last in itertools.pairwise([0, *sorted(set(cuts) - {0, 50}), 50]):
        piece = slice(first, last)
        part_starts = None if starts is None else starts[:, piece]
        means, state = prefix_softmax(
            logits[:, piece], values[:, piece], window=window, state=state, starts=part_starts
        )
        pieces.append(means)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(torch.exp(state.logits_BSH - 80), torch.exp(final.logits_BSH - 80), rtol=1e-9, atol=0)
    visible = (final.logits_BSH > -torch.inf)[..., None]
    torch.testing.assert_close(state.values_BSHD * visible, final.values_BSHD * visible, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("compute", [unchecked.prefix_softmax, portable.prefix_softmax], ids=["op", "portable"])
def test_token_by_token_is_as_exact_as_at_once(compute: Callable) -> None:
    """Also with large logits, whose float32 has few digits behind the point: nothing adds up."""
    num_time = 3000
    logits, values = make_logits("random", (1, num_time, H)) + 80, make_values((1, num_time, H, D))
    logits, values, state, pieces = logits.float(), values.float(), None, []
    for t in range(num_time):
        means, state = compute(logits[:, t : t + 1], values[:, t : t + 1], state=state)
        pieces.append(means)
    exact, _ = prefix_softmax(logits.double(), values.double())
    assert relative_error(torch.cat(pieces, 1)[:, -1000:], exact[:, -1000:]) < 1e-5


def test_shifting_all_logits_changes_nothing() -> None:
    logits, values = make_logits("random", (B, T, H)), make_values((B, T, H, D))
    for window in (None, 7):
        plain, shifted = (prefix_softmax(logits + c, values, window=window)[0] for c in (0.0, 500.0))
        torch.testing.assert_close(plain, shifted, rtol=1e-10, atol=1e-10)


def test_the_future_cannot_leak_even_through_the_shift() -> None:
    logits, values = make_logits("low", (1, T, 1)).float(), make_values((1, T, 1, 2)).float()
    later = logits.clone()
    later[:, 40:] = 1e4
    for window in (None, 9):
        torch.testing.assert_close(
            prefix_softmax(logits, values, window=window)[0][:, :40],
            prefix_softmax(later, values, window=window)[0][:, :40],
            rtol=0,
            atol=0,
        )


@pytest.mark.parametrize("window", [None, 5])
def test_it_compiles_and_exports_as_one_graph(window: int | None) -> None:
    class Pool(torch.nn.Module):
        def forward(self, logits: Tensor, values: Tensor) -> Tensor:
            return unchecked.prefix_softmax(logits, values, window=window)[0]

    inputs = make_logits("random", (1, 80, 2)).float(), make_values((1, 80, 2, 3)).float()
    torch.testing.assert_close(torch.export.export(Pool(), inputs).module()(*inputs), Pool()(*inputs))
    compiled = torch.compile(Pool(), fullgraph=True, backend="aot_eager")
    for length in (1, 40, 80):
        piece = inputs[0][:, :length], inputs[1][:, :length]
        torch.testing.assert_close(compiled(*piece), Pool()(*piece))


def test_a_wrong_window_or_shape_is_named() -> None:
    with pytest.raises(InputError, match="window: 0 given"):
        unchecked.prefix_softmax(torch.zeros(1, 2, 1), torch.zeros(1, 2, 1, 1), window=0)
    with pytest.raises(InputError, match="values: shape"):
        unchecked.prefix_softmax(torch.zeros(1, 2, 1), torch.zeros(1, 3, 1, 1))
    logits, values = torch.zeros(4, 20, 2), torch.zeros(4, 20, 2, 3)
    of_window = unchecked.prefix_softmax(logits, values, window=4)[1]
    of_one_row = unchecked.prefix_softmax(logits[:1], values[:1])[1]
    for name, fields in (
        ("starts", {"starts": torch.zeros(1, 20, dtype=torch.bool)}), ("own_logits", {"own_logits": logits[:1]}),
        ("state", {"state": of_window}), ("state", {"state": of_one_row}),
    ):  # fmt: skip
        with pytest.raises(InputError, match=rf"^{name}: shape .* given, but it must be \(4, "):
            unchecked.prefix_softmax(logits, values, **fields)


@pytest.mark.parametrize("more", [{"window": 3}, {"null_logit": 0.5}])
def test_an_own_term_beside_a_window_or_a_null_token_is_refused(more: dict[str, float]) -> None:
    logits = torch.zeros(1, 2, 1)
    with pytest.raises(InputError, match=f"own_logits: given with {' '.join(map(str, *more.items()))}"):
        unchecked.prefix_softmax(logits, torch.zeros(1, 2, 1, 1), own_logits=logits, **more)
    with pytest.raises(InputError, match="own_logits: given with"):
        unchecked.prefix_softmax_weights(logits, own_logits=logits, **more)
