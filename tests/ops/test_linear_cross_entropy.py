"""linear_cross_entropy against its equation, with all gradients, and its memory."""

import pytest
import torch

from multilin.ops.linear_cross_entropy import chunked, reference
from tests.ops.checked import linear_cross_entropy, token_cross_entropy
from tests.ops.largest import LargestTensor

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
    monkeypatch.setattr(chunked, "CHUNK_NUMBERS", chunk_rows * V)
    hidden, weight, biases, targets = make_inputs(bias=bias)
    leaves = [x.requires_grad_() for x in (hidden, weight, biases) if x is not None]
    results = []
    for compute in (reference.linear_cross_entropy, linear_cross_entropy):
        total = compute(hidden, weight, biases, targets, logit_scale=0.3, label_smoothing=smoothing)
        results.append([total, *torch.autograd.grad(2.5 * total, leaves)])
    torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-12)


def test_terms_are_the_rows_of_the_sum() -> None:
    inputs = make_inputs()
    terms = token_cross_entropy(*inputs, label_smoothing=0.1)
    assert terms[3] == 0
    torch.testing.assert_close(terms.sum(), reference.linear_cross_entropy(*inputs, label_smoothing=0.1))
    with torch.no_grad():
        torch.testing.assert_close(linear_cross_entropy(*inputs, label_smoothing=0.1), terms.sum())


def test_autocast_stays_near_float32() -> None:
    inputs = make_inputs(torch.float32)
    leaves = [x.requires_grad_() for x in inputs[:3]]
    plain = torch.autograd.grad(linear_cross_entropy(*inputs), leaves)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = torch.autograd.grad(linear_cross_entropy(*inputs), leaves)
    for expected, result in zip(plain, rounded, strict=True):
        assert result.dtype == torch.float32
        assert (result - expected).norm() / expected.norm() < 1e-2


def test_peak_memory_is_a_chunk_of_logits_not_all() -> None:
    """Counts the largest tensor made on the way: of the order of a chunk, far below N x V."""
    num_rows, vocab = 4096, 8192
    hidden, weight = torch.randn(num_rows, 8, requires_grad=True), torch.randn(vocab, 8, requires_grad=True)
    with LargestTensor() as watch:
        linear_cross_entropy(hidden, weight, None, torch.zeros(num_rows, dtype=torch.long)).backward()
    assert watch.numbers <= chunked.CHUNK_NUMBERS < num_rows * vocab / 2
