"""Ops with a gradient of their own say so where a second derivative would lack a part."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from multilin.layers.base import Layout
from multilin.layers.short_convolution import ShortConvolution
from multilin.ops.block_outer import block_outer
from multilin.ops.delta_rule import delta_rule
from multilin.ops.int8 import int8_linear
from multilin.ops.linear_cross_entropy import linear_cross_entropy
from multilin.ops.prefix_softmax import prefix_softmax
from multilin.ops.softmax import softmax
from multilin.ops.windowed_attention import windowed_attention


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def _short_convolution() -> Tensor:
    layer = ShortConvolution(6)
    layer.initialize(0.1)
    layout = Layout(torch.arange(20)[None], None, None, needs_state=False)
    return layer(draw(1, 20, 6), None, layout)[0]


CALLS: dict[str, Callable[[], Tensor]] = {
    "prefix_softmax": lambda: prefix_softmax(draw(1, 20, 2), draw(1, 20, 2, 3))[0],
    "prefix_softmax, window": lambda: prefix_softmax(draw(1, 20, 2), draw(1, 20, 2, 3), window=4)[0],
    "block_outer": lambda: block_outer(draw(20, 2, 4), draw(20, 2, 4), draw(6, 2, 4, 4)),
    "delta_rule": lambda: delta_rule(draw(1, 20, 2, 4), draw(1, 20, 2, 4), draw(1, 20, 2, 4))[0],
    "windowed_attention": lambda: windowed_attention(*(draw(1, 20, 2, 4) for _ in range(3)), window=5)[0],
    "int8_linear": lambda: int8_linear(draw(20, 8), draw(6, 8)),
    "linear_cross_entropy": lambda: linear_cross_entropy(draw(20, 4), draw(6, 4), None, torch.arange(20) % 6),
    "softmax": lambda: softmax(draw(3, 4)),
    "short_convolution": _short_convolution,
}


@pytest.mark.parametrize("name", CALLS)
def test_a_graph_of_the_gradient_is_refused(name: str) -> None:
    """The part would be left out silently: where only inputs are asked for, autograd does not reach the op again."""
    torch.manual_seed(0)
    result = CALLS[name]()
    with pytest.raises(RuntimeError, match="differentiable once"):
        result.square().sum().backward(create_graph=True)
