"""Forward-mode derivatives: right, or refused, but never without the part of an op."""

import re

import pytest
import torch
from torch.autograd import forward_ad

from multilin.ops.prefix_softmax import prefix_softmax
from tests.contract.conftest import MakeModel, random_ids

# A sentence of ours, or of PyTorch's about functions and wrapped tensors that have no such derivative.
REFUSALS = "has no forward-mode derivative|implement the jvp|setup_context staticmethod|access data pointer"


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # PyTorch's own use of it
@pytest.mark.parametrize("way", ["dual numbers", "torch.func"])
def test_where_there_is_one_it_is_the_gradients_product_with_the_direction(make_model: MakeModel, way: str) -> None:
    model, ids = make_model(torch.float32), random_ids(2, 20)
    names, values = zip(*((name, p.detach()) for name, p in model.named_parameters()), strict=True)
    generator = torch.Generator().manual_seed(3)
    directions = tuple(torch.randn(value.shape, generator=generator) for value in values)

    def logits(*parameters: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, dict(zip(names, parameters, strict=True)), (ids,)).logits

    try:
        if way == "torch.func":
            _, derivative = torch.func.jvp(logits, values, directions)
        else:
            with forward_ad.dual_level():
                dual = [forward_ad.make_dual(*pair) for pair in zip(values, directions, strict=True)]
                derivative = forward_ad.unpack_dual(logits(*dual)).tangent
    except RuntimeError as error:
        if not re.search(REFUSALS, str(error)):
            raise
        return
    weights = torch.randn(derivative.shape, generator=generator)
    gradients = torch.autograd.grad((model(ids).logits * weights).sum(), list(model.parameters()), allow_unused=True)
    pairs = [(g, d) for g, d in zip(gradients, directions, strict=True) if g is not None]
    expected = sum((g * d).sum().double() for g, d in pairs)
    scale = sum((g * d).square().sum().double() for g, d in pairs).sqrt()
    assert ((derivative * weights).sum().double() - expected).abs() <= 1e-3 * scale


def test_an_op_refuses_it() -> None:
    logits, values = torch.zeros(1, 4, 1), torch.randn(1, 4, 1, 3)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(logits, torch.ones_like(logits))
        with pytest.raises(RuntimeError, match="prefix_softmax has no forward-mode derivative"):
            prefix_softmax(dual, values)
        prefix_softmax(logits, values)
