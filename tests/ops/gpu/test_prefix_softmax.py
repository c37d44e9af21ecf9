"""Triton's kernels of prefix_softmax: held against the definition in float64, interpreted or on a card."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from multilin.ops.prefix_softmax import PREFIX_SOFTMAX, PrefixSoftmaxState, gpu, operator, portable, reference
from tests.ops import prefix_softmax_case
from tests.ops.cases.prefix_softmax import make_logits, make_values
from tests.ops.comparing import TOLERANCE, check_compiled, poison_memory
from tests.ops.prefix_softmax_case import Case, any_case, everything

pytestmark = pytest.mark.slow  # interpreted, where there is no card

prefix_softmax = partial(operator.prefix_softmax, "gpu")
CHUNK = 16  # of the interpreter's small cases; on a card the chunk is as it is


@pytest.fixture(autouse=True)
def small_and_poisoned(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    poison_memory(monkeypatch)
    if device.type == "cpu":
        monkeypatch.setattr(gpu, "CHUNK", CHUNK)
        use_processors(monkeypatch, 1)


def use_processors(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """As if the card had so many: with many of them the time of few texts is cut in parts."""
    monkeypatch.setattr(gpu._launch, "num_processors", lambda device: number)


def check(case: Case, device: torch.device) -> None:
    prefix_softmax_case.check(case, prefix_softmax, device)


@pytest.mark.parametrize("window", [None, 5, 23])
@pytest.mark.parametrize("name", ["peaked", "one early spike"])
def test_it_is_the_definition(name: str, window: int | None, device: torch.device) -> None:
    for options in ({}, *everything(window)):
        check(Case(name, (1, 37, 2, 5), window=window, **options), device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("window", [None, 23])
def test_it_is_the_definition_in_half_precision(window: int | None, dtype: torch.dtype, device: torch.device) -> None:
    for options in everything(window):
        check(Case("peaked", (1, 37, 1, 9), dtype, window, **options), device)


@pytest.mark.parametrize(("window", "parts", "whole"), [(None, 3, 3), (64, 16, 3), (128, 16, 7), (71, 16, 3)])
@pytest.mark.parametrize("name", ["random", "spikes"])
def test_time_is_cut_in_parts(
    name: str, window: int | None, parts: int, whole: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole past where texts and heads are few; windows that take in several parts as a whole."""
    use_processors(monkeypatch, 40)
    monkeypatch.setattr(gpu, "CHUNK", CHUNK)
    if device.type == "cpu":  # on a card kernels were compiled before
        from triton import language as tl

        from multilin.ops.prefix_softmax import gpu_backward, gpu_forward

        for kernels in (gpu_forward, gpu_backward):
            monkeypatch.setattr(kernels, "TOKENS", tl.constexpr(2))
    shape = (1, 250, 1, 5)
    cut = gpu.plan(torch.empty(shape), window)
    assert (cut.parts, cut.whole) == (parts, whole)
    for options in ({}, *everything(window)):
        check(Case(name, shape, window=window, share=0.01, **options), device)


@pytest.mark.parametrize("window", [None, 64])
def test_time_and_wide_heads_are_cut(window: int | None, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    use_processors(monkeypatch, 40)
    monkeypatch.setattr(gpu, "CHUNK", CHUNK)
    shape = (1, 250, 1, 150)
    cut = gpu.plan(torch.empty(shape), window)
    assert cut.splits > 1
    assert cut.parts > 1
    check(Case("random", shape, torch.bfloat16, window, packed=True, share=0.01, null=0.3), device)


@pytest.mark.parametrize("window", [None, 20])
def test_wide_heads_are_cut_in_slices(window: int | None, device: torch.device) -> None:
    shape = (1, 37, 1, 150)
    assert gpu.plan(torch.empty(shape), window).splits > 1
    for options in everything(window):
        check(Case("random", shape, window=window, **options), device)


# The same examples each time: among thousands of tiny tensors some sum to much less than the terms that were rounded.
@settings(max_examples=10, deadline=None, derandomize=True)
@given(any_case(st.tuples(*map(st.integers, (1, 1, 1, 1), (2, 33, 2, 20))), list(TOLERANCE), 40))
def test_it_is_the_definition_at_any_size(case: Case) -> None:
    from multilin.ops.kernels import is_interpreted

    check(case, torch.device("cpu" if is_interpreted() else "cuda"))


def test_a_large_logit_at_the_beginning_costs_no_precision(device: torch.device) -> None:
    for window in (None, 50):
        logits, values = make_logits("random", (1, 300, 1)).float(), make_values((1, 300, 1, 4)).float()
        logits[:, 0] = 80
        exact, _ = reference.prefix_softmax(logits.double(), values.double(), window=window)
        found, _ = prefix_softmax(logits.to(device), values.to(device), window=window)
        assert (found.cpu() - exact).norm() / exact.norm() <= 5e-6


@pytest.mark.parametrize("window", [None, 20])
def test_the_same_call_gives_the_same_bits(window: int | None, device: torch.device) -> None:
    logits, values = make_logits("peaked", (1, 40, 2)).float(), make_values((1, 40, 2, 8)).bfloat16()
    first, second = (prefix_softmax(logits.to(device), values.to(device), window=window) for _ in range(2))
    for a, b in zip((first[0], *first[1]), (second[0], *second[1]), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("window", [None, 7])
def test_slices_of_one_projection_need_no_copy(window: int | None, device: torch.device) -> None:
    projected = make_values((2, 5, 3 * 24), seed=4).float().to(device)
    logits = make_logits("random", (2, 5, 9)).float().to(device)
    part = projected.chunk(3, dim=-1)[1].unflatten(-1, (3, 8))
    slices = logits[:, :, 3:6].requires_grad_(), part.requires_grad_()
    copies = [x.detach().contiguous().requires_grad_() for x in slices]
    # The gradient of a sum is one number seen everywhere; a transposed one lies apart.
    one = torch.ones(1, device=device).expand(2, 5, 3, 8)
    for slanted in (one, make_values((5, 2, 3, 8)).float().to(device).transpose(0, 1)):
        found, expected = (prefix_softmax(*x, window=window)[0] for x in (slices, copies))
        assert torch.equal(found, expected)
        first = torch.autograd.grad(found, slices, slanted)
        second = torch.autograd.grad(expected, copies, slanted.contiguous())
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("window", [None, 1, 7, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_is_the_definition(window: int | None, dtype: torch.dtype, device: torch.device) -> None:
    """One position after a state, by the kernel that takes nothing else: without gradients."""
    B, H, D = 3, 2, 20
    past = reference.prefix_softmax(make_logits("peaked", (B, 9, H)), make_values((B, 9, H, D)), window=window)[1]
    past = PrefixSoftmaxState(*(x.float() for x in past))
    logits, own = make_logits("masked", (B, 1, H), seed=5).float(), make_logits("masked", (B, 1, H), seed=6).float()
    values = make_values((B, 1, H, D), seed=9).to(dtype)
    starts = torch.tensor([[True], [False], [False]])
    for own_logits, null, begins in ((None, None, None), (None, 0.3, starts), (own, None, starts)):
        if own_logits is not None and window is not None:
            continue
        doubles = (None if x is None else x.double() for x in (logits, values, own_logits))
        double_logits, double_values, double_own = doubles
        exact, exact_after = reference.prefix_softmax(
            double_logits, double_values, window=window, own_logits=double_own, null_logit=null, starts=begins,
            state=PrefixSoftmaxState(*(x.double() for x in past)),
        )  # fmt: skip
        moved = (None if x is None else x.to(device) for x in (logits, values, own_logits, begins))
        my_logits, my_values, my_own, my_starts = moved
        state = PrefixSoftmaxState(*(x.to(device) for x in past))
        found, after = prefix_softmax(
            my_logits, my_values, window=window, own_logits=my_own, null_logit=null, starts=my_starts, state=state
        )
        assert found.dtype == dtype
        assert (found.cpu() - exact).norm() / exact.norm() <= TOLERANCE[dtype]
        for a, b in zip(after, exact_after, strict=True):
            torch.testing.assert_close(a.cpu().double(), b, rtol=1e-5, atol=1e-5)


def test_reading_token_by_token_is_reading_at_once(device: torch.device) -> None:
    for window in (None, 4):
        logits, values = make_logits("spikes", (2, 9, 2)).float(), make_values((2, 9, 2, 5)).float()
        logits, values = logits.to(device), values.to(device)
        whole, final = prefix_softmax(logits, values, window=window)
        state, means = None, []
        for t in range(9):
            mean, state = prefix_softmax(logits[:, t : t + 1], values[:, t : t + 1], window=window, state=state)
            means.append(mean)
        torch.testing.assert_close(torch.cat(means, 1), whole, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(state.values_BSHD, final.values_BSHD, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 5])
def test_compiled_is_eager(window: int | None, device: torch.device) -> None:
    def loss(logits: Tensor, values: Tensor) -> Tensor:
        return prefix_softmax(logits, values, window=window, null_logit=0.1)[0].square().sum()

    inputs = make_logits("random", (1, 20, 2)).float(), make_values((1, 20, 2, 8)).float()
    check_compiled(loss, *(x.to(device) for x in inputs))


@pytest.mark.parametrize("window", [None, 3])
def test_a_compiled_step_is_eager(window: int | None, device: torch.device) -> None:
    past = 1 if window is None else window - 1
    state = PrefixSoftmaxState(torch.zeros(2, past, 2, device=device), torch.ones(2, past, 2, 8, device=device))

    def step(logits: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, after = prefix_softmax(logits, values, window=window, state=state)
        return mean, *after

    inputs = torch.zeros(2, 1, 2, device=device), make_values((2, 1, 2, 8)).float().to(device)
    with torch.no_grad():
        for a, b in zip(torch.compile(step, fullgraph=True, backend="aot_eager")(*inputs), step(*inputs), strict=True):
            torch.testing.assert_close(a, b)


def test_dispatch_takes_the_kernels_for_gpus_and_refuses_what_they_cannot() -> None:
    backend = PREFIX_SOFTMAX.backend_for(torch.device("cuda"), torch.float32, (torch.empty(1, 1, 1, 8),))
    assert backend.name.startswith("triton")
    with pytest.warns(UserWarning, match="prefix_softmax: triton.*heads are 10000 wide.*portable"):
        PREFIX_SOFTMAX.backend_for(torch.device("cuda"), torch.float32, (torch.empty(1, 1, 1, 10_000),))


def check_on_a_card(name: str, shape: tuple[int, ...], window: int | None, dtype: torch.dtype) -> None:
    """Means, state and gradients against the portable path in float64."""
    logits, values = make_logits(name, shape[:3]).float().cuda(), make_values(shape).to(dtype).cuda()
    found = []
    for compute, kind in ((portable.prefix_softmax, torch.float64), (prefix_softmax, dtype)):
        inputs = logits.to(torch.float64 if kind == torch.float64 else torch.float32), values.to(kind)
        inputs = [x.requires_grad_() for x in inputs]
        means, state = compute(*inputs, window=window)
        weight = make_values(shape, seed=3).to(means)
        found.append([means, *state, *torch.autograd.grad((means * weight).sum(), inputs)])
    for exact, result in zip(*found, strict=True):
        exact, result = (x.nan_to_num(neginf=0.0).double() for x in (exact, result))
        assert (result - exact).norm() / exact.norm() <= TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 64, 100, 300, 1024, 4096])
@pytest.mark.parametrize("shape", [(2, 2048, 4, 128), (1, 8192, 2, 64), (1, 3001, 5, 96)], ids=str)
@pytest.mark.parametrize("name", ["random", "spikes"])
def test_large_shapes_on_a_card(name: str, shape, window: int | None, dtype: torch.dtype) -> None:
    check_on_a_card(name, shape, window, dtype)


@pytest.mark.gpu
def test_a_step_can_be_captured_in_a_graph() -> None:
    state = PrefixSoftmaxState(torch.zeros(4, 1, 8, device="cuda"), torch.ones(4, 1, 8, 64, device="cuda"))
    logits, values = torch.zeros(4, 1, 8, device="cuda"), torch.zeros(4, 1, 8, 64, device="cuda")
    prefix_softmax(logits, values, state=state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        means, _ = prefix_softmax(logits, values, state=state)
    values.fill_(3.0)
    graph.replay()
    torch.testing.assert_close(means, torch.full_like(means, 2.0))
