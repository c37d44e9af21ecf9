"""windowed_attention: the definition against loops, the portable path against the definition, and the laws."""

import itertools
import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from multilin.errors import InputError
from multilin.ops import windowed_attention as unchecked
from multilin.ops.windowed_attention import WINDOWED_ATTENTION, gpu, portable, reference
from tests.ops.cases.prefix_softmax import make_starts
from tests.ops.cases.windowed_attention import OPTIONS, make_inputs
from tests.ops.checked import windowed_attention
from tests.ops.comparing import LargestTensor, check_near, with_gradients

B, T, H, D, E = 2, 131, 2, 3, 5


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("packed", [False, True])
def test_the_definition_is_the_equation(name: str, packed: bool) -> None:
    options, (q, k, v) = OPTIONS[name], make_inputs(1, 17, 2, D, E)
    starts, padding = (make_starts((1, 17)) if packed else None), torch.arange(17)[None] < 3
    expected = torch.zeros_like(v)
    for t, h in itertools.product(range(17), range(2)):
        distances = [0] if options["window"] == 0 else range(1, min(options["window"], t) + 1)
        read = [(0.0, torch.zeros(E, dtype=torch.float64))] if options.get("null_key") else []
        for d in distances:
            if padding[0, t - d] or (packed and starts[0, t - d + 1 : t + 1].any()):
                continue
            logit = options.get("scale", 1.0) * float(q[0, t, h] @ k[0, t - d, h])
            logit += 0.0 if d == 0 else options.get("hyper", 0.0) / d - options.get("slope", 0.0) * d
            read.append((logit, v[0, t - d, h]))
        top = max((logit for logit, _ in read), default=0.0)
        total = math.fsum(math.exp(logit - top) for logit, _ in read)
        for logit, value in read:
            expected[0, t, h] += math.exp(logit - top) / total * value
    result, _ = windowed_attention(q, k, v, **options, padding=padding, starts=starts)
    torch.testing.assert_close(result, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("packed", [False, True])
def test_the_portable_path_equals_the_definition(name: str, packed: bool) -> None:
    """Means, state and all gradients, decays included, from a state."""
    options = {"scale": 1.0, "slope": 0.0, "hyper": 0.0, **OPTIONS[name]}
    starts = make_starts((B, T), share=0.03) if packed else None
    padding = (torch.arange(T) % 17 == 3).expand(B, -1)
    ways = [portable.windowed_attention] * (options["window"] > 0) + [portable.one_token] * (options["window"] <= 1)
    earlier = [*make_inputs(B, 9, H, D, E, seed=3)[1:], torch.zeros(B, 9, dtype=torch.float64)]
    results = []
    for attend in (reference.windowed_attention, *ways):
        decay = [torch.tensor(options[key], dtype=torch.float64) for key in ("slope", "hyper")]
        inputs = [x.clone().requires_grad_() for x in (*make_inputs(B, T, H, D, E), *decay, *earlier[:2])]
        q, k, v, slope, hyper, *before = inputs
        state = unchecked.WindowedAttentionState(*before, earlier[2])
        means, after = attend(
            q, k, v, padding=padding, state=state, starts=starts, **{**options, "slope": slope, "hyper": hyper}
        )
        total = means.sin().sum() + after.keys_BSHD.cos().sum() + after.values_BSHE.cos().sum()
        gradients = torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True)
        results.append([means, *after, *gradients])
    for found in results[1:]:
        for expected, result in zip(results[0], found, strict=True):
            torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-10)


@settings(max_examples=30, deadline=None)
@given(name=st.sampled_from(sorted(OPTIONS)), cuts=st.lists(st.integers(1, 130), max_size=4), packed=st.booleans())
def test_reading_in_pieces_equals_reading_at_once(name, cuts, packed) -> None:
    q, k, v = make_inputs(B, T, H, D, E)
    starts = make_starts((B, T), share=0.03) if packed else None
    whole, _ = windowed_attention(q, k, v, **OPTIONS[name], starts=starts)
    state, pieces, sizes = None, [], set()
    for first, last in itertools.pairwise([0, *sorted(set(cuts)), T]):
        part = slice(first, last)
        part_starts = None if starts is None else starts[:, part]
        means, state = windowed_attention(
            q[:, part], k[:, part], v[:, part], **OPTIONS[name], state=state, starts=part_starts
        )
        pieces.append(means)
        sizes.add(state.keys_BSHD.shape)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-10, atol=1e-10)
    assert sizes == {(B, OPTIONS[name]["window"], H, D)}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("low", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-3)])
def test_precision_against_float64(name: str, low: torch.dtype, tolerance: float) -> None:
    inputs, compute = [x.to(low) for x in make_inputs(B, T, H, D, E)], partial(windowed_attention, **OPTIONS[name])
    check_near(with_gradients(compute, inputs), with_gradients(compute, inputs, torch.float64), tolerance)


def test_an_empty_past_gives_zero_and_zero_gradients() -> None:
    """At the start of each text and where everything visible is padding, with and without a null key."""
    q, k, v = (x.requires_grad_() for x in make_inputs(1, T, H, D, E))
    starts, padding = torch.arange(T)[None] == 50, (torch.arange(T)[None] >= 70) & (torch.arange(T)[None] < 90)
    for null_key in (False, True):
        means, _ = windowed_attention(q, k, v, window=4, null_key=null_key, starts=starts, padding=padding)
        empty = torch.zeros(T, dtype=torch.bool)
        empty[[0, 50]] = True
        empty[74:91] = True
        assert (means[0, empty] == 0).all()
        assert (means[0, ~empty] != 0).all()
        for gradient in torch.autograd.grad(means[0, empty].sum(), (q, k, v)):
            assert (gradient == 0).all()


@pytest.mark.parametrize("window", [0, 1])
@pytest.mark.parametrize("score", [0.0, 10.0, 20.0, -20.0])
def test_a_null_key_leaves_gradients_their_digits(window: int, score: float) -> None:
    """Also where the other token has nearly all of the weight."""
    q, k, v = make_inputs(B, T, H, D, E)
    inputs = (1 + 0.01 * q).float(), (1 + 0.01 * k).float(), v.float()
    attend = partial(windowed_attention, window=window, scale=score / D, null_key=True, needs_state=False)
    check_near(with_gradients(attend, inputs), with_gradients(attend, inputs, torch.float64), 1e-5)


@pytest.mark.parametrize("numbers", [1, 3000, 50_000])
@pytest.mark.parametrize("window", [3, 40, 1000])
def test_how_the_work_is_cut_changes_nothing(monkeypatch, numbers: int, window: int) -> None:
    monkeypatch.setitem(portable.NUMBERS, "cpu", numbers)
    inputs, options = make_inputs(3, T, H, D, E), {"window": window, "scale": 0.7, "slope": 0.1, "null_key": True}
    ways = (partial(backend.windowed_attention, **options) for backend in (portable, reference))
    torch.testing.assert_close(*(with_gradients(way, inputs) for way in ways), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    ("window", "lengths"), [pytest.param(64, (4096, 16384), marks=pytest.mark.slow), (100_000, (1024, 4096))]
)
def test_no_tensor_on_the_way_grows_with_the_pairs(window: int, lengths: tuple[int, int]) -> None:
    """Forward and backward, the largest tensor is a tile or of the inputs' size, never time x window x heads."""
    largest = []
    for length in lengths:
        inputs = [x.float().requires_grad_() for x in make_inputs(1, length, 4, 4, 4)]
        with LargestTensor() as watch:
            windowed_attention(*inputs, window=window)[0].sum().backward()
        largest.append(watch.numbers)
    assert max(largest) <= max(4 * portable.NUMBERS["cpu"], 16 * lengths[1])
    assert max(largest) < lengths[1] * min(window, lengths[1]) * 4 / 3


def test_every_backend_is_tested_and_bad_input_is_named() -> None:
    assert {b.compute for b in WINDOWED_ATTENTION.backends} == {
        gpu.windowed_attention,  # in tests/ops/gpu
        portable.windowed_attention,
        reference.windowed_attention,
    }
    x = torch.zeros(1, 2, 1, 3)
    with pytest.raises(InputError, match="window: -1 given"):
        unchecked.windowed_attention(x, x, x, window=-1)
    with pytest.raises(InputError, match="keys: shape"):
        unchecked.windowed_attention(x, x[:, :1], x, window=3)
    _, of_other_window = unchecked.windowed_attention(x, x, x, window=4)
    for name, fields in (
        ("state", {"state": of_other_window}), ("starts", {"starts": torch.zeros(2, 2, dtype=torch.bool)}),
        ("padding", {"padding": torch.zeros(1, 1, dtype=torch.bool)}),
    ):  # fmt: skip
        with pytest.raises(InputError, match=rf"^{name}: shape .* given, but it must be \(1, "):
            unchecked.windowed_attention(x, x, x, window=3, **fields)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-3)])
def test_wide_windows_whose_blocks_are_larger_are_the_definition(dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, 700, 2, 8, generator=generator).to(dtype) for _ in range(3)]
    options = {"window": 600, "scale": 0.3, "null_key": True, "needs_state": False}
    exact = with_gradients(partial(reference.windowed_attention, **options), inputs, torch.float64)
    check_near(with_gradients(partial(portable.windowed_attention, **options), inputs), exact, tolerance)
