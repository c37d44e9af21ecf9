"""minGRU's layer against the paper's formulas, position after position and channel after channel."""

import math

import pytest
import torch
from torch import Tensor

from multilin.architectures.mingru import MinGruLayer, MinGruOptions
from multilin.layers import Layer, Layout

WIDTH, LENGTH = 6, 11


def make_layer(options: dict) -> Layer:
    torch.manual_seed(0)
    layer = MinGruLayer(WIDTH, MinGruOptions(**options)).double().eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    return layer


def written_out(layer: Layer, x_TD: Tensor) -> Tensor:
    """The layer's output for one text, in plain loops."""
    weights = {name: parameter.detach() for name, parameter in layer.named_parameters()}

    def norm(name: str, x_D: Tensor) -> Tensor:
        centred = x_D - x_D.mean()
        scaled = centred / math.sqrt(float(centred.square().mean()) + 1e-5)
        return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def sigmoid(value: float) -> float:
        return 1 / (1 + math.exp(-value))

    def g(value: float) -> float:
        return value + 0.5 if value >= 0 else sigmoid(value)

    inputs = [norm("attention_norm", x_D) for x_D in x_TD]
    gates_ED, candidates_ED = weights["attention.projections.weight"].chunk(2)
    hidden, result = [0.0] * len(gates_ED), []
    for t, x_D in enumerate(x_TD):
        c_D = inputs[t]
        if "attention.convolution.weight" in weights:
            taps = weights["attention.convolution.weight"].flip(0)  # the current token's first
            c_D = sum(tap * inputs[t - i] for i, tap in enumerate(taps) if i <= t)
        for e in range(len(hidden)):
            z = sigmoid(float(gates_ED[e] @ c_D))
            hidden[e] = (1 - z) * hidden[e] + z * g(float(candidates_ED[e] @ c_D))
        x_D = x_D + weights["attention.output.weight"] @ torch.tensor(hidden, dtype=torch.float64)
        middle = weights["feed_forward.expand.weight"] @ norm("feed_forward_norm", x_D)
        gelu = torch.tensor([m * 0.5 * (1 + math.erf(m / math.sqrt(2))) for m in middle.tolist()], dtype=torch.float64)
        result.append(x_D + weights["feed_forward.contract.weight"] @ gelu)
    return torch.stack(result)


@pytest.mark.parametrize("options", [{}, {"convolution": False}, {"expansion": 2}], ids=str)
def test_the_layer_is_the_paper_s(options: dict) -> None:
    layer = make_layer(options)
    x_BTD = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
    y_BTD, _ = layer(x_BTD, None, Layout(torch.arange(LENGTH).expand(2, -1)))
    for x_TD, y_TD in zip(x_BTD, y_BTD, strict=True):
        torch.testing.assert_close(y_TD, written_out(layer, x_TD), rtol=1e-11, atol=1e-11)
