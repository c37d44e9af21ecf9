"""windowed_attention's Triton kernels against the definition in float64."""

import pytest
import torch

from multilin.ops.windowed_attention import WindowedAttentionState, gpu, reference
from tests.ops.cases.prefix_softmax import make_starts
from tests.ops.cases.windowed_attention import OPTIONS, make_inputs
from tests.ops.comparing import TOLERANCE, poison_memory

pytestmark = pytest.mark.slow  # interpreted, where there is no card

CPU_SHAPE = (1, 67, 2, 5, 19)
DECAYING = {"window": 64, "scale": 0.2, "hyper": 20.0}  # one weight of nearly 1 everywhere
LARGE = {
    "narrow": ((3, 2049, 4, 64, 64), {"window": 64, "scale": 0.1, "slope": 0.5, "null_key": True}),
    "decaying": ((2, 1031, 4, 128, 256), {"window": 64, "scale": 0.1, "hyper": 20.0}),
    "wide": ((2, 2000, 2, 128, 128), {"window": 5000, "scale": 0.1, "null_key": True}),
}


def near(result: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    result, expected = result.double(), expected.double()
    # The gradient of a decay is one sum of many terms of about 1 that mostly cancel.
    least = 1.0 if expected.ndim == 0 else 1e-12
    return bool((result - expected).norm() <= tolerance * expected.norm().clamp(min=least))


def check(
    shape, options, dtype, device, *, packed: bool = False, with_state: bool = False, learned: bool = True
) -> None:
    """Means, state and every gradient, learned decays and the state's included; inputs lie in a wider tensor."""
    options = {"scale": 1.0, "slope": 0.0, "hyper": 0.0, **options}
    num_batch, length, *_ = shape
    padding = (torch.arange(length, device=device) % 17 == 3).expand(num_batch, -1)
    starts = make_starts((num_batch, length), share=0.03).to(device) if packed else None
    earlier = make_inputs(num_batch, 9, *shape[2:], seed=3)[1:] if with_state else ()
    wide = [torch.cat([x, x], dim=-1).to(device, dtype)[..., : x.shape[-1]] for x in make_inputs(*shape)]
    direction, found = make_inputs(*shape, seed=8)[2].to(device, dtype), []
    for backend, kind in ((reference, torch.float64), (gpu, dtype)):
        exact = torch.promote_types(kind, torch.float32)
        decays = [torch.tensor(options[key], dtype=exact, device=device) for key in ("slope", "hyper") if learned]
        before = [x.to(device, dtype).to(exact) for x in earlier]
        inputs = [x.requires_grad_() for x in (*(x.detach().to(kind) for x in wide), *decays, *before)]
        if kind == dtype:
            inputs[:3] = [x.detach().requires_grad_() for x in wide]
        state = (
            WindowedAttentionState(*inputs[3 + len(decays) :], torch.zeros(num_batch, 9, dtype=exact, device=device))
            if with_state
            else None
        )
        means, after = backend.windowed_attention(
            *inputs[:3], padding=padding, state=state, starts=starts,
            **options | ({"slope": inputs[3], "hyper": inputs[4]} if learned else {}),
        )  # fmt: skip
        gradients = torch.autograd.grad(
            (means * direction.to(kind)).sum(), inputs, allow_unused=True, materialize_grads=True
        )
        found.append([means, *after, *gradients])
    for expected, result in zip(*found, strict=True):
        if not expected.isfinite().all():  # the state's logits
            assert torch.equal(result.float(), expected.float())
            continue
        assert near(result, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("name", [name for name in OPTIONS if OPTIONS[name]["window"]])
@pytest.mark.parametrize("packed", [False, True])
def test_means_state_and_gradients(name: str, packed: bool, device: torch.device, monkeypatch) -> None:
    poison_memory(monkeypatch)
    check(CPU_SHAPE, OPTIONS[name], torch.float32, device, packed=packed, with_state=packed)


@pytest.mark.parametrize("decay", [{}, {"slope": 0.05}, {"hyper": 2.0}], ids=str)
def test_decays_that_are_numbers_and_tiles_that_are_read_whole(decay: dict[str, float], device: torch.device) -> None:
    check((1, 200, 1, 4, 4), {"window": 150, "null_key": True, **decay}, torch.float32, device, learned=False)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_tiles_that_are_read_whole_at_size(dtype: torch.dtype, device: torch.device) -> None:
    check((1, 1031, 2, 128, 128), {"window": 900, "scale": 128**-0.5}, dtype, device, learned=False)


@pytest.mark.parametrize("name", ["null key", "hyperbolic decay", "peaked"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_types(name: str, dtype: torch.dtype, device: torch.device, monkeypatch) -> None:
    poison_memory(monkeypatch)
    check(CPU_SHAPE, OPTIONS[name], dtype, device, with_state=True)


def test_the_gradient_keeps_its_digits_where_one_weight_is_nearly_1(device: torch.device) -> None:
    check((1, 130, 1, 16, 16), DECAYING, torch.float32, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", LARGE)
def test_at_size(name: str, dtype: torch.dtype, device: torch.device) -> None:
    check(*LARGE[name], dtype, device, packed=True, with_state=True)


@pytest.mark.gpu
@pytest.mark.parametrize("way", [1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_way_to_compile_is_right(way: int, dtype: torch.dtype, device: torch.device) -> None:
    check((1, 515, 2, 64, 64), LARGE["narrow"][1], dtype, device, packed=True, with_state=True)


@pytest.mark.parametrize("name", [name for name in OPTIONS if OPTIONS[name]["window"]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_decoding_token_by_token_equals_reading_at_once(name, dtype, device: torch.device, monkeypatch) -> None:
    """The kernel for one token: means and the state it writes, with starts and padding."""
    poison_memory(monkeypatch)
    options = {"scale": 1.0, **OPTIONS[name], "window": min(OPTIONS[name]["window"], 40)}
    inputs = [x.to(device, dtype) for x in make_inputs(2, 45, 2, 5, 19)]
    padding = torch.zeros(2, 45, dtype=torch.bool, device=device)
    padding[1, 41] = True
    starts = torch.zeros(2, 45, dtype=torch.bool, device=device)
    starts[0, 43] = True
    exact = [x.double() for x in inputs]
    expected, last = reference.windowed_attention(*exact, padding=padding, starts=starts, **options)
    with torch.no_grad():
        means, state = gpu.windowed_attention(*(x[:, :40] for x in inputs), padding=padding[:, :40], **options)
        for t in range(40, 45):
            new = slice(t, t + 1)
            mean, state = gpu.windowed_attention(
                *(x[:, new] for x in inputs), padding=padding[:, new], state=state, starts=starts[:, new], **options
            )
            means = torch.cat([means, mean], dim=1)
    assert means.dtype == dtype
    assert near(means, expected, TOLERANCE[dtype])
    assert torch.equal(state.logits_BS, last.logits_BS.float())
    assert near(state.keys_BSHD, last.keys_BSHD, 1e-7)
    assert near(state.values_BSHE, last.values_BSHE, 1e-7)


def test_the_forward_pass_is_deterministic(device: torch.device) -> None:
    inputs = [x.to(device, torch.float32) for x in make_inputs(*CPU_SHAPE)]
    first, second = (gpu.windowed_attention(*inputs, window=9, scale=1.0)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_an_empty_past_gives_zero_and_zero_gradients(device: torch.device) -> None:
    inputs = [x.to(device, torch.float32).requires_grad_() for x in make_inputs(1, 33, 1, 3, 5)]
    padding = (torch.arange(33, device=device) < 20)[None]
    for null_key in (False, True):
        means, _ = gpu.windowed_attention(*inputs, padding=padding, window=4, scale=1.0, null_key=null_key)
        assert (means[0, :21] == 0).all()
        assert all((x == 0).all() for x in torch.autograd.grad(means[0, :21].sum(), inputs))


def test_compiled_is_eager(device: torch.device) -> None:
    inputs = [x.to(device, torch.float32).requires_grad_() for x in make_inputs(1, 21, 1, 3, 5)]

    def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return gpu.windowed_attention(queries, keys, values, window=4, scale=1.0, slope=0.5)[0]

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    results = [function(*inputs) for function in (attend, compiled)]
    gradients = [torch.autograd.grad(result.sin().sum(), inputs) for result in results]
    assert torch.equal(*results)
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


def test_the_ops_are_well_formed_operators(device: torch.device) -> None:
    inputs = [x.to(device, torch.float32).requires_grad_() for x in make_inputs(1, 17, 1, 3, 5)]
    options = (4, 1.0, 0.1, 0.0, True)
    arguments = (*inputs, torch.zeros(1, 17, device=device), None, None, *options)
    torch.library.opcheck(torch.ops.multilin.windowed_attention_gpu.default, arguments)
    new = [x[:, :1].detach() for x in inputs]
    state = (inputs[1].detach()[:, :4], inputs[2].detach()[:, :4], torch.zeros(1, 4, device=device))
    arguments = (*new, torch.zeros(1, 1, device=device), *state, None, None, 1.0, 0.0, 0.0, True)
    torch.library.opcheck(
        torch.ops.multilin.windowed_attention_gpu_step.default, arguments, test_utils=("test_schema", "test_faketensor")
    )


def test_heads_too_wide_are_refused_with_the_reason() -> None:
    assert gpu.refuses(*(torch.zeros(1, 1, 1, n) for n in (256, 256, 16))) is None
    assert "wider than 256" in str(gpu.refuses(*(torch.zeros(1, 1, 1, n) for n in (16, 16, 257))))
