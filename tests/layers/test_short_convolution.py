"""The short convolution against its equation, token by token: texts, padding, pieces, gradients, number types."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from multilin.layers import Layout, ShortConvolution, short_convolution

B, T, D = 2, 141, 5


def equation(x_BTD: Tensor, weight_KD: Tensor, starts_BT: Tensor, padding_BT: Tensor) -> Tensor:
    """Every position by itself, with the positions before it as far back as its text."""
    result = torch.zeros_like(x_BTD)
    for row, t in itertools.product(range(len(x_BTD)), range(x_BTD.shape[1])):
        for before in range(min(len(weight_KD), t + 1)):
            if not padding_BT[row, t - before]:
                result[row, t] = result[row, t] + weight_KD[-1 - before] * x_BTD[row, t - before]
            if starts_BT[row, t - before]:
                break
    return result


def make(kernel_size: int = 4, *, seed: int = 0, share: float = 0.2) -> tuple[ShortConvolution, Tensor, Tensor, Tensor]:
    """A convolution in float64, inputs, and random starts and padding."""
    generator = torch.Generator().manual_seed(seed)
    convolution = ShortConvolution(D, kernel_size).double()
    convolution.initialize(0.02)
    x_BTD = torch.randn(B, T, D, generator=generator, dtype=torch.float64)
    starts_BT, padding_BT = (torch.rand(B, T, generator=generator) < part for part in (share, share / 2))
    return convolution, x_BTD, starts_BT, padding_BT


def layout(starts: Tensor | None = None, padding: Tensor | None = None, *, needs_state: bool = True) -> Layout:
    return Layout(torch.zeros(1, 1, dtype=torch.long), starts, padding, needs_state)


@pytest.mark.parametrize("kernel_size", [1, 4, 7])
@pytest.mark.parametrize("way", ["_convolve_channels_last", "_add_shifted"])
@pytest.mark.parametrize(("packed", "padded"), [(False, False), (True, False), (False, True), (True, True)])
def test_sums_and_gradients_are_those_of_the_equation(
    kernel_size: int, packed: bool, padded: bool, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the sums are made on a CPU, and as they are on a GPU."""
    monkeypatch.setattr(short_convolution, "_convolve", getattr(short_convolution, way))
    convolution, x, starts, padding = make(kernel_size)
    x.requires_grad_()
    starts, padding = starts & packed, padding & padded
    given = layout(starts if packed else None, padding if padded else None, needs_state=False)
    result, state = convolution(x, None, given)
    assert state is None
    results = []
    for sums in (equation(x, convolution.weight, starts, padding), result):
        results.append([sums, *torch.autograd.grad(sums.sin().sum(), (x, convolution.weight))])
    torch.testing.assert_close(results[1], results[0], rtol=1e-11, atol=1e-11)


@settings(max_examples=20, deadline=None)
@given(
    cuts=st.lists(st.integers(1, T - 1), max_size=5, unique=True).map(sorted),
    packed=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_reading_in_pieces_is_reading_at_once(cuts: list[int], packed: bool, seed: int) -> None:
    convolution, x, starts, _ = make(seed=seed)
    whole, end = convolution(x, None, layout(starts if packed else None))
    state, pieces = None, []
    for first, last in itertools.pairwise([0, *cuts, T]):
        given = layout(starts[:, first:last] if packed else None)
        piece, state = convolution(x[:, first:last], state, given)
        pieces.append(piece)
        assert state.shape == (B, 3, D)
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state, end, rtol=0, atol=0)


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("num_read", [0, 2, 5])
def test_padding_around_a_row_is_as_if_it_were_not_there(at_end: bool, num_read: int) -> None:
    """Also where a row has no token at all: its state stays as it was. Padding before tokens is at a text's start."""
    convolution, x, _, _ = make()
    if num_read and not at_end:
        return
    state = convolution(x[:, :num_read], None, layout())[1] if num_read else None
    lengths = [0, 1, 2, 3, 9]
    rows = x[:1, 20:29].expand(len(lengths), -1, -1).clone()
    states = None if state is None else state[:1].expand(len(lengths), -1, -1)
    index, length = torch.arange(9)[None], torch.tensor(lengths)[:, None]
    padding = index >= length if at_end else index < 9 - length
    rows[padding] = torch.inf
    result, after = convolution(rows, states, layout(padding=padding))
    for row, count in enumerate(lengths):
        tokens = rows[row : row + 1][:, ~padding[row]]
        expected = state[:1] if state is not None else torch.zeros(1, 3, D, dtype=x.dtype)
        if count:
            alone, expected = convolution(tokens, None if states is None else states[:1], layout())
            torch.testing.assert_close(result[row : row + 1][:, ~padding[row]], alone, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(after[row : row + 1], expected, rtol=0, atol=0)


def test_another_text_leaves_no_trace_whatever_it_holds() -> None:
    convolution, x, _, _ = make()
    x[:, :70] = 1e300
    starts = (torch.arange(T) == 70).expand(B, -1)
    result, state = convolution(x, None, layout(starts))
    alone, end = convolution(x[:, 70:], None, layout())
    torch.testing.assert_close(result[:, 70:], alone, rtol=1e-12, atol=1e-12)
    assert torch.equal(state, end)
    _, state = convolution(x[:, :71], None, layout(starts[:, :71]))
    assert torch.equal(state, torch.cat([torch.zeros(B, 2, D), x[:, 70:71]], dim=1))


@pytest.mark.parametrize(("low", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
def test_precision_against_float64(low: torch.dtype, tolerance: float) -> None:
    """Under autocast, too; the state is in float32 at least."""
    convolution, x, starts, _ = make()
    results = []
    for dtype in (torch.float64, low):
        module = ShortConvolution(D).to(low)
        module.weight.data = convolution.weight.data.to(low)
        inputs = x.to(low).to(dtype).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            result, state = module.to(dtype)(inputs, None, layout(starts))
        assert result.dtype == dtype
        assert state.dtype == torch.promote_types(dtype, torch.float32)
        results.append([result, *torch.autograd.grad(result.float().square().sum(), (inputs, module.weight))])
    for expected, found in zip(*results, strict=True):
        assert (found.double() - expected).norm() <= tolerance * expected.norm()


def test_it_begins_as_pytorchs_convolutions_do() -> None:
    torch.manual_seed(0)
    convolution = ShortConvolution(1000)
    convolution.initialize(1e-3)
    weight = convolution.weight.detach()
    assert weight.abs().max() <= 0.5
    assert weight.std().item() == pytest.approx(0.5 / 3**0.5, rel=0.05)
