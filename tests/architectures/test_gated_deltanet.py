"""Gated DeltaNet against transformers' own, the linear layer of Qwen3-Next, with the same weights."""

from typing import Any

import pytest
import torch
from transformers import Qwen3NextConfig

from multilin.architectures.gated_deltanet import GatedDeltaNet, GatedDeltaNetLayer, GatedDeltaNetOptions
from multilin.errors import InputError
from multilin.layers import Layout
from tests.qwen3_next import in_float64

D, H, VALUE_SIZE = 24, 3, 5


@pytest.fixture
def qwen(monkeypatch: pytest.MonkeyPatch) -> torch.nn.Module:
    """Their layer in float64."""
    config = Qwen3NextConfig(
        hidden_size=D, num_hidden_layers=1, layer_types=["linear_attention"], linear_num_key_heads=H,
        linear_num_value_heads=H, linear_key_head_dim=D // H, linear_value_head_dim=VALUE_SIZE,
        linear_conv_kernel_dim=4, rms_norm_eps=1e-6,
    )  # fmt: skip
    torch.manual_seed(0)
    layer = in_float64(monkeypatch).Qwen3NextGatedDeltaNet(config, 0).double()
    torch.nn.init.normal_(layer.norm.weight)
    return layer


def same_weights(theirs: torch.nn.Module) -> GatedDeltaNet:
    """Ours with their weights, which lie head by head: of each head q, k, v and gate, and rate and step."""
    ours = GatedDeltaNet(D, GatedDeltaNetOptions(num_heads=H, value_size=VALUE_SIZE)).double()
    width = D // H
    parts = theirs.in_proj_qkvz.weight.view(H, -1, D).split([width, width, VALUE_SIZE, VALUE_SIZE], dim=1)
    q, k, v, gate = (part.flatten(0, 1) for part in parts)
    rates, steps = theirs.in_proj_ba.weight.view(H, 2, D).unbind(1)
    weights = {
        "projections.weight": torch.cat([q, k, v]), "output_gate.weight": gate, "rates.weight": rates,
        "decays.steps.weight": steps, "decays.step_bias": theirs.dt_bias, "decays.log_factor": theirs.A_log,
        "convolution.weight": theirs.conv1d.weight[:, 0].T, "norm.weight": theirs.norm.weight,
        "output.weight": theirs.out_proj.weight,
    }  # fmt: skip
    ours.load_state_dict(weights)
    return ours


@pytest.mark.parametrize("length", [1, 3, 150])
@pytest.mark.parametrize("pieces", [1, 2])
def test_outputs_and_gradients_are_those_of_transformers(qwen: torch.nn.Module, length: int, pieces: int) -> None:
    """Also read in pieces."""
    ours, x = same_weights(qwen), torch.randn(2, length, D, dtype=torch.float64, requires_grad=True)
    expected = qwen(x)
    state, parts = None, []
    for part in x.chunk(pieces, dim=1):
        y, state = ours(part, state, Layout(torch.arange(part.shape[1])[None]))
        parts.append(y)
    assert expected.dtype == torch.float64
    result = torch.cat(parts, dim=1)
    torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-9)
    gradients = [torch.autograd.grad(y.sin().sum(), x)[0] for y in (expected, result)]
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-9, atol=1e-9)


def test_left_padding_is_theirs(qwen: torch.nn.Module) -> None:
    ours, x = same_weights(qwen), torch.randn(2, 9, D, dtype=torch.float64)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, :4] = 0
    result, _ = ours(x, None, Layout(torch.arange(9)[None], padding_BT=mask == 0))
    expected = qwen(x, attention_mask=mask)
    torch.testing.assert_close(result[mask == 1], expected[mask == 1], rtol=1e-9, atol=1e-9)


def build(**options: Any) -> GatedDeltaNet:
    torch.manual_seed(0)
    layer = GatedDeltaNetLayer(D, GatedDeltaNetOptions(num_heads=H, **options)).attention.double()
    if layer.decays is not None:
        layer.decays.initialize(0.02)
    if layer.convolution is not None:
        layer.convolution.initialize(0.02)
    return layer


def test_without_its_switches_it_is_linear_attention() -> None:
    """y_t = norm(sum_{s<=t} (q_t . k_s) v_s), as one masked product."""
    layer = build(decays=False, corrects=False, convolution=None, output_gate=False)
    h = torch.randn(2, 70, D, dtype=torch.float64)
    q, k, v = (
        x.unflatten(-1, (H, -1)).transpose(1, 2)
        for x in torch.nn.functional.silu(h @ layer.projections.weight.T).chunk(3, dim=-1)
    )
    unit_q, unit_k = (x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + 1e-6) for x in (q, k))
    read = ((unit_q @ unit_k.mT) * (D // H) ** -0.5).tril() @ v
    expected = torch.nn.functional.rms_norm(read, read.shape[-1:], eps=1e-6).transpose(1, 2).flatten(2)
    result, _ = layer(h, None, Layout(torch.arange(70)[None]))
    torch.testing.assert_close(result, expected @ layer.output.weight.T, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("switch", ["decays", "corrects", "convolution", "output_gate"])
def test_every_switch_changes_what_is_read(switch: str) -> None:
    h = torch.randn(1, 20, D, dtype=torch.float64)
    with_it, without = build(), build(**{switch: None if switch == "convolution" else False})
    shared = {name: tensor for name, tensor in with_it.state_dict().items() if name in without.state_dict()}
    without.load_state_dict(shared)
    results = [layer(h, None, Layout(torch.arange(20)[None]))[0] for layer in (with_it, without)]
    assert (results[0] - results[1]).norm() > 1e-3 * results[0].norm()


def test_heads_begin_with_decays_of_the_source() -> None:
    """Between one token's e^-1.6 and a hundred thousand's."""
    torch.manual_seed(0)
    decays = GatedDeltaNetLayer(64, GatedDeltaNetOptions(num_heads=64)).attention.decays
    decays.initialize(0.02)
    logs = decays(torch.zeros(1, 1, 64)).detach()
    assert (logs < 0).all()
    assert logs.min() >= -1.6 - 1e-4
    assert logs.max() >= -0.1


def test_negative_eigenvalues_need_rates() -> None:
    with pytest.raises(InputError, match="negative_eigenvalues: true given, but there are no rates"):
        GatedDeltaNet(D, GatedDeltaNetOptions(num_heads=H, corrects=False, negative_eigenvalues=True))


def test_negative_eigenvalues_double_the_rates() -> None:
    """The first token stores b v under its key."""
    x_BTD = torch.randn(1, 1, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    layers = [
        GatedDeltaNet(D, GatedDeltaNetOptions(num_heads=H, negative_eigenvalues=doubles)).double()
        for doubles in (False, True)
    ]
    layers[1].load_state_dict(layers[0].state_dict())
    stored = [layer(x_BTD, None, Layout(torch.zeros(1, 1, dtype=torch.long)))[1].matrices[0] for layer in layers]
    assert stored[0].abs().sum() > 0
    torch.testing.assert_close(stored[1], 2 * stored[0])
