"""The compiled CPU kernels of prefix_softmax, which know no float64: held against the definition in it."""

import multiprocessing
import os
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from multilin.ops.kernels import why_no_numba
from multilin.ops.prefix_softmax import PREFIX_SOFTMAX, operator, prefix_softmax, reference
from tests.ops import prefix_softmax_case
from tests.ops.cases.prefix_softmax import make_logits, make_starts, make_values
from tests.ops.prefix_softmax_case import Case, any_case, everything
from tests.processes import PYTHON, run

pytestmark = [
    pytest.mark.skipif(why_no_numba() is not None, reason=str(why_no_numba())), pytest.mark.usefixtures("poisoned"),
]  # fmt: skip

by_kernels = partial(operator.prefix_softmax, "cpu")
DTYPES = [torch.bfloat16, torch.float32]
HARD = ["random", "peaked", "spikes", "rising", "one early spike", "masked", "masked head", "all masked"]


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def check(case: Case) -> None:
    prefix_softmax_case.check(case, by_kernels)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 1, 2, 5, 31, 64, 1000])
@pytest.mark.parametrize("name", HARD)
def test_it_is_the_definition(name: str, window: int | None, dtype: torch.dtype) -> None:
    check(Case(name, (2, 67, 3, 13), dtype, window))
    for options in everything(window):
        check(Case(name, (2, 67, 3, 5), dtype, window, **options))


@settings(max_examples=100, deadline=None)
@given(any_case(st.tuples(*map(st.integers, (1, 1, 1, 1), (3, 150, 5, 33))), DTYPES, 160))
def test_it_is_the_definition_at_any_size(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("window", [None, 16, 200])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", ["random", "spikes"])
def test_threads_share_the_work(two_threads: None, batch: int, window: int | None, name: str) -> None:
    """One text on two threads cuts time in parts."""
    for options in ({}, *everything(window)):
        check(Case(name, (batch, 401, 3, 32), window=window, **options))


def test_starting_its_threads_leaves_the_number_of_those_of_pytorch() -> None:
    program = """
import torch, multilin.ops.prefix_softmax as op
torch.set_num_threads(2)
logits, values = torch.zeros(2, 800, 4, requires_grad=True), torch.zeros(2, 800, 4, 16)
op.prefix_softmax(logits, values)[0].sum().backward()
assert torch.get_num_threads() == 2
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "2"}
    run([*PYTHON, "-c", program], environment=environment)


@pytest.mark.parametrize("window", [None, 50])
def test_a_large_logit_at_the_beginning_costs_no_precision(window: int | None) -> None:
    logits, values = make_logits("random", (1, 4000, 2)).float(), make_values((1, 4000, 2, 8)).float()
    logits[:, 0] = 80
    exact, _ = reference.prefix_softmax(logits.double(), values.double(), window=window)
    found, _ = prefix_softmax(logits, values, window=window)
    assert (found - exact).norm() / exact.norm() <= 5e-6


@pytest.mark.parametrize("batch", [1, 2])  # time is divided among the threads, or texts are
def test_rounding_does_not_add_up_over_a_long_text(two_threads: None, batch: int) -> None:
    logits = 3 * make_logits("random", (batch, 131_072, 1))
    values, weight = (make_values((*logits.shape, 4), seed=seed) for seed in (1, 2))
    inputs = logits.float().requires_grad_(), values.float().requires_grad_()
    found, _ = prefix_softmax(*inputs)
    gradients = torch.autograd.grad((found * weight.float()).sum(), inputs)
    exact_inputs = logits.float().double().requires_grad_(), values.float().double().requires_grad_()
    weights = (exact_inputs[0] - logits.max()).exp()[..., None]
    exact = (weights * exact_inputs[1]).cumsum(1) / weights.cumsum(1)
    exact_gradients = torch.autograd.grad((exact * weight.float().double()).sum(), exact_inputs)
    for result, expected in zip([found, *gradients], [exact, *exact_gradients], strict=True):
        assert (result - expected).norm() / expected.norm() < 1e-6


@pytest.mark.parametrize("window", [None, 7])
def test_bf16_values_far_from_zero_cost_the_gradient_of_the_logits_no_digits(window: int | None) -> None:
    values = (make_values((2, 67, 3, 13)).float() + 5).to(torch.bfloat16)
    weights = make_values((2, 67, 3, 13), seed=3).to(torch.bfloat16)
    gradients = []
    for dtype in (torch.float64, torch.bfloat16):
        logits = make_logits("random", (2, 67, 3)).to(torch.promote_types(dtype, torch.float32)).requires_grad_()
        means, _ = prefix_softmax(logits, values.to(dtype), window=window, needs_state=False)
        gradients.append(torch.autograd.grad((means * weights.to(dtype)).sum(), logits)[0])
    expected, found = gradients
    assert (found - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 7])
def test_slices_of_one_projection_need_no_copy(window: int | None, dtype: torch.dtype) -> None:
    projected = make_values((2, 40, 3 * 24), seed=4).to(dtype)
    logits = make_logits("random", (2, 40, 9)).float()
    parts = [part.unflatten(-1, (3, 8)) for part in projected.chunk(3, dim=-1)]
    for i, part in enumerate(parts):
        slices = logits[:, :, 3 * i : 3 * i + 3].requires_grad_(), part.requires_grad_()
        copies = [x.detach().clone().requires_grad_() for x in slices]
        found, expected = (by_kernels(*x, window=window)[0] for x in (slices, copies))
        assert torch.equal(found, expected)
        for a, b in zip(
            torch.autograd.grad(found.sum(), slices), torch.autograd.grad(expected.sum(), copies), strict=True
        ):
            assert torch.equal(a, b)
        # The gradient of a sum is one number seen everywhere; a transposed one lies apart.
        slanted = make_values((40, 2, 3, 8)).to(dtype).transpose(0, 1)
        apart, together = (by_kernels(*copies, window=window)[0] for _ in range(2))
        first = torch.autograd.grad(apart, copies, slanted)
        second = torch.autograd.grad(together, copies, slanted.contiguous())
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def _mean_in_child(queue: "multiprocessing.SimpleQueue", inputs: tuple[Tensor, Tensor]) -> None:
    # PyTorch's own operations on several threads would wait for ever here, so NumPy adds.
    queue.put(float(prefix_softmax(*inputs)[0].numpy().sum(dtype=float)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_forked_process_can_use_it_too(two_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As workers of a data loader may, after their parent has used it on several threads."""
    monkeypatch.undo()
    inputs = make_logits("random", (2, 700, 4)).float(), make_values((2, 700, 4, 16)).float()
    expected = float(prefix_softmax(*inputs)[0].numpy().sum(dtype=float))
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=_mean_in_child, args=(queue, inputs))
    child.start()
    child.join(300)
    child.kill()
    assert child.exitcode == 0
    assert queue.get() == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("window", [None, 5])
def test_the_operator_keeps_the_contract_of_operators(window: int | None) -> None:
    logits, values = make_logits("random", (2, 20, 3)).float(), make_values((2, 20, 3, 4)).float()
    inputs, state, null = (logits, values, None), (None, None), 0.3
    if window is None:
        inputs, null = (logits, values, make_logits("random", (2, 20, 3), seed=4).float()), -torch.inf
        state = make_logits("random", (2, 1, 3)), make_values((2, 1, 3, 4)).float()
    inputs, state = ([None if x is None else x.requires_grad_() for x in tensors] for tensors in (inputs, state))
    arguments = ("cpu", *inputs, make_starts((2, 20)), *state, window, null, True, window is None)
    torch.library.opcheck(torch.ops.multilin.prefix_softmax.default, arguments)


def test_half_precision_and_double_go_where_they_can_be_computed() -> None:
    assert PREFIX_SOFTMAX.backend_for(torch.device("cpu"), torch.float32).name.startswith("numba")
    assert not PREFIX_SOFTMAX.backend_for(torch.device("cpu"), torch.float64).name.startswith("numba")
    logits, values = make_logits("random", (1, 9, 2)), make_values((1, 9, 2, 4))
    exact = prefix_softmax(logits, values)[0]
    for dtype, error in ((torch.float16, 2e-3), (torch.bfloat16, 2e-2)):
        means, state = prefix_softmax(logits.to(dtype), values.to(dtype))
        assert means.dtype == dtype
        assert state.values_BSHD.dtype == torch.float32
        torch.testing.assert_close(means.double(), exact, rtol=0, atol=error)


def test_numba_is_imported_by_the_first_call_and_not_before() -> None:
    program = """
import sys, torch, multilin.ops.prefix_softmax as op
assert "numba" not in sys.modules
op.prefix_softmax(torch.zeros(1, 2, 1), torch.zeros(1, 2, 1, 1))
assert "numba" in sys.modules
"""
    run([*PYTHON, "-c", program])
