"""linear_cross_entropy against its equation, with all gradients, and its memory."""

import math

import pytest
import torch

from multilin.errors import InputError
from multilin.ops import linear_cross_entropy as unchecked
from multilin.ops.kernels import why_no_numba
from multilin.ops.linear_cross_entropy import cpu, portable, reference
from tests.ops.checked import linear_cross_entropy, token_cross_entropy
from tests.ops.comparing import LargestTensor, with_gradients

N, D, V = 37, 7, 29


def make_inputs(dtype: torch.dtype = torch.float64, *, bias: bool = True) -> list:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, D, generator=generator, dtype=dtype)
    weight = torch.randn(V, D, generator=generator, dtype=dtype)
    targets = torch.randint(V, (N,), generator=generator)
    targets[[3, 11]] = -100
    biases = torch.randn(V, generator=generator, dtype=dtype) if bias else None
    return [hidden, weight, biases, targets]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk_rows", [1, 5, 1000])
def test_loss_and_gradients_are_those_of_the_equation(monkeypatch, smoothing, bias, chunk_rows) -> None:
    monkeypatch.setitem(unchecked.NUMBERS, "cpu", chunk_rows * V)
    hidden, weight, biases, targets = make_inputs(bias=bias)
    ways = (lambda *x, compute=compute: compute(*x, targets, label_smoothing=smoothing) for compute in
            (linear_cross_entropy, reference.linear_cross_entropy))  # fmt: skip
    torch.testing.assert_close(*(with_gradients(w, (hidden, weight, biases)) for w in ways), rtol=1e-12, atol=1e-12)


def test_terms_are_the_rows_of_the_sum() -> None:
    inputs = make_inputs()
    terms = token_cross_entropy(*inputs)
    assert terms[3] == 0
    torch.testing.assert_close(terms.sum(), reference.linear_cross_entropy(*inputs))
    with torch.no_grad():
        for options in ({}, {"label_smoothing": 0.1}):
            total = linear_cross_entropy(*inputs, **options)
            torch.testing.assert_close(total, reference.linear_cross_entropy(*inputs, **options))


def test_autocast_leaves_float64_alone() -> None:
    inputs = make_inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = linear_cross_entropy(*inputs)
    assert torch.equal(found, linear_cross_entropy(*inputs))


def test_autocast_stays_near_float32() -> None:
    inputs = make_inputs(torch.float32)
    leaves = [x.requires_grad_() for x in inputs[:3]]
    plain = torch.autograd.grad(linear_cross_entropy(*inputs), leaves)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = torch.autograd.grad(linear_cross_entropy(*inputs), leaves)
    for expected, result in zip(plain, rounded, strict=True):
        assert result.dtype == torch.float32
        assert (result - expected).norm() / expected.norm() < 1e-2


@pytest.mark.skipif(why_no_numba() is not None, reason=str(why_no_numba()))
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-3)])
def test_the_kernel_is_the_definition(smoothing, bias, dtype, tolerance) -> None:
    """Its inputs are the products as they are, so that only its own rounding counts."""
    generator = torch.Generator().manual_seed(0)
    logits = (5 * torch.randn(37, 131, generator=generator)).to(dtype)
    logits[5, 7], logits[6] = 80.0, -80.0
    biases = torch.randn(131, generator=generator).requires_grad_() if bias else None
    targets = torch.randint(131, (37,), generator=generator)
    targets[[3, 11]] = -100
    options = {"label_smoothing": smoothing, "makes_gradient": True}
    exact = portable.losses_and_gradient(
        logits.double(), None if biases is None else biases.detach().double().requires_grad_(), targets, **options
    )
    losses, _, _ = cpu.losses_and_gradient(logits.clone(), biases, targets, **{**options, "makes_gradient": False})
    for expected, found in zip(
        (*exact, exact[0]), (*cpu.losses_and_gradient(logits.clone(), biases, targets, **options), losses), strict=True
    ):
        if expected is None:
            assert found is None
            continue
        error = tolerance if found.dtype == dtype else 1e-5
        assert (found.double() - expected).norm() <= error * expected.norm()


@pytest.mark.skipif(why_no_numba() is not None, reason=str(why_no_numba()))
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf])
def test_a_logit_that_is_no_number_makes_the_loss_none(bad: float) -> None:
    logits = torch.zeros(2, 40)
    logits[1, 17] = bad
    losses, dlogits, _ = cpu.losses_and_gradient(
        logits, None, torch.tensor([3, 4]), label_smoothing=0.0, makes_gradient=True
    )
    assert losses[0].isfinite()
    assert losses[1].isnan() or losses[1].isinf()
    assert not dlogits[1].isfinite().all()


def test_peak_memory_is_a_chunk_of_logits_not_all() -> None:
    """Counts the largest tensor made on the way: of the order of a chunk, far below N x V."""
    num_rows, vocab = 4096, 8192
    hidden, weight = torch.randn(num_rows, 8, requires_grad=True), torch.randn(vocab, 8, requires_grad=True)
    with LargestTensor() as watch:
        linear_cross_entropy(hidden, weight, None, torch.zeros(num_rows, dtype=torch.long)).backward()
    assert watch.numbers <= unchecked.NUMBERS["cpu"] < num_rows * vocab / 2


@pytest.mark.parametrize("counted", [0, 16])
def test_rows_that_count_nothing_take_no_logits(counted: int) -> None:
    vocab = 8192
    hidden, weight = torch.randn(4096, 8, requires_grad=True), torch.randn(vocab, 8, requires_grad=True)
    targets = torch.full((4096,), -100)
    targets[::256][:counted] = 5
    with LargestTensor() as watch:
        total = linear_cross_entropy(hidden, weight, None, targets)
        total.backward()
        terms = token_cross_entropy(hidden, weight, None, targets)
    assert watch.numbers <= max(counted * vocab, weight.numel())
    assert hidden.grad[targets == -100].eq(0).all()
    torch.testing.assert_close(terms.sum(), total.detach())
    assert terms[targets == -100].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("target", [-1, 7])
def test_a_target_that_is_no_token_is_named_in_every_dtype(dtype: torch.dtype, target: int) -> None:
    hidden, weight = torch.zeros(3, 4, dtype=dtype), torch.zeros(7, 4, dtype=dtype)
    for function in (unchecked.linear_cross_entropy, unchecked.token_cross_entropy):
        with pytest.raises(InputError, match=rf"^targets: {target} given, but ids are 0 to 6"):
            function(hidden, weight, None, torch.tensor([0, -100, target]))
        with pytest.raises(InputError, match=r"^targets: shape \(2,\) given, but it must be \(3,\)"):
            function(hidden, weight, None, torch.tensor([0, 1]))
    with pytest.raises(InputError, match=r"^label_smoothing: 1\.5 given"):
        linear_cross_entropy(hidden, weight, None, torch.tensor([0, 1, 2]), label_smoothing=1.5)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_gradient_that_is_not_needed_changes_no_other(frozen: str) -> None:
    hidden, weight, bias, targets = make_inputs()
    whole = [tensor.detach().clone().requires_grad_() for tensor in (hidden, weight)]
    expected = torch.autograd.grad(linear_cross_entropy(*whole, bias, targets), whole)
    part = [tensor.detach().clone().requires_grad_(name != frozen) for name, tensor in
            (("hidden", hidden), ("weight", weight))]  # fmt: skip
    linear_cross_entropy(*part, bias, targets).backward()
    for tensor, gradient in zip(part, expected, strict=True):
        assert tensor.grad is None if not tensor.requires_grad else torch.equal(tensor.grad, gradient)
