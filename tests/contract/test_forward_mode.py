"""Forward-mode derivatives are refused: kernels would leave their part out without a word."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from multilin.ops.linear_cross_entropy import linear_cross_entropy
from multilin.ops.prefix_softmax import prefix_softmax
from tests.contract.conftest import MakeModel, random_ids

# A sentence of ours, or of PyTorch's about functions and wrapped tensors that have no such derivative.
REFUSALS = "has no forward-mode derivative|implement the jvp|setup_context staticmethod|access data pointer"


def with_dual_numbers(function: Callable[..., Tensor], values: tuple[Tensor, ...], along: tuple[Tensor, ...]) -> None:
    with forward_ad.dual_level():
        function(*map(forward_ad.make_dual, values, along))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # PyTorch's own use of it
@pytest.mark.parametrize("derive", [with_dual_numbers, torch.func.jvp])
def test_a_model_refuses_it(make_model: MakeModel, derive: Callable[..., Any]) -> None:
    model, ids = make_model(torch.float32), random_ids(2, 20)
    names, values = zip(*((name, p.detach()) for name, p in model.named_parameters()), strict=True)

    def logits(*parameters: Tensor) -> Tensor:
        return torch.func.functional_call(model, dict(zip(names, parameters, strict=True)), (ids,)).logits

    with pytest.raises(RuntimeError, match=REFUSALS):
        derive(logits, values, tuple(map(torch.ones_like, values)))


def test_an_op_refuses_it() -> None:
    logits, values = torch.zeros(1, 4, 1), torch.randn(1, 4, 1, 3)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(logits, torch.ones_like(logits))
        with pytest.raises(RuntimeError, match="prefix_softmax has no forward-mode derivative"):
            prefix_softmax(dual, values)
        prefix_softmax(logits, values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("derive", [with_dual_numbers, torch.func.jvp])
def test_the_loss_refuses_it(derive: Callable[..., Any], dtype: torch.dtype) -> None:
    hidden, weight = torch.randn(5, 3, dtype=dtype), torch.randn(7, 3, dtype=dtype)
    with pytest.raises(RuntimeError, match=REFUSALS):
        derive(lambda h: linear_cross_entropy(h, weight, None, torch.arange(5)), (hidden,), (torch.ones_like(hidden),))
