"""windowed_attention: the definition against loops, the portable path against the definition, and the laws."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from multilin.errors import InputError
from multilin.ops import windowed_attention as unchecked
from multilin.ops.prefix_softmax.cases import make_starts
from multilin.ops.windowed_attention import WINDOWED_ATTENTION, portable, reference
from multilin.ops.windowed_attention.cases import OPTIONS, make_inputs
from tests.ops.checked import windowed_attention

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
    logits = torch.zeros(B, T, dtype=torch.float64).masked_fill(torch.arange(T) % 17 == 3, -torch.inf)
    earlier = [*make_inputs(B, 9, H, D, E, seed=3)[1:], torch.zeros(B, 9, dtype=torch.float64)]
    results = []
    for backend in (reference, portable):
        decay = [torch.tensor(options[key], dtype=torch.float64) for key in ("slope", "hyper")]
        inputs = [x.clone().requires_grad_() for x in (*make_inputs(B, T, H, D, E), *decay, *earlier[:2])]
        q, k, v, slope, hyper, *before = inputs
        state = unchecked.WindowedAttentionState(*before, earlier[2])
        means, after = backend.windowed_attention(
            q, k, v, logits, state=state, starts=starts, **{**options, "slope": slope, "hyper": hyper}
        )
        total = means.sin().sum() + after.keys_BSHD.cos().sum() + after.values_BSHE.cos().sum()
        gradients = torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True)
        results.append([means, *after, *gradients])
    for expected, result in zip(*results, strict=True):
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
    results, weight = [], make_inputs(B, T, H, D, E, seed=8)[2].to(low)
    for dtype in (torch.float64, low):
        inputs = [x.to(low).to(dtype).requires_grad_() for x in make_inputs(B, T, H, D, E)]
        means, _ = windowed_attention(*inputs, **OPTIONS[name])
        results.append([means, *torch.autograd.grad((means * weight.to(dtype)).sum(), inputs)])
    for expected, result in zip(*results, strict=True):
        assert (result.double() - expected).norm() <= tolerance * expected.norm().clamp(min=1e-12)


def test_every_backend_is_tested_and_bad_input_is_named() -> None:
    assert {b.compute for b in WINDOWED_ATTENTION.backends} == {
        portable.windowed_attention,
        reference.windowed_attention,
    }
    x = torch.zeros(1, 2, 1, 3)
    with pytest.raises(InputError, match="window: -1 given"):
        unchecked.windowed_attention(x, x, x, window=-1)
    with pytest.raises(InputError, match="keys: shape"):
        unchecked.windowed_attention(x, x[:, :1], x, window=3)
