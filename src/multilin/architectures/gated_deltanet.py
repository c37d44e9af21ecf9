"""Gated DeltaNet: linear attention with one matrix per head; a token replaces the value stored under its key.

Let h = RMSNorm(x), s = swish, c a convolution over the last four tokens, and unit(v) = v / |v|. Each head computes:

    q = unit(s(c(W_q h))) / sqrt(width)        k = unit(s(c(W_k h)))        v = s(c(W_v h))
    a_t = e^(-A softplus(w_a . h_t + d))        b_t = sigmoid(w_b . h_t)
    S_t = a_t S_(t-1) (1 - b_t k_t k_t^T) + b_t v_t k_t^T        y_t = RMSNorm(S_t q_t) * s(W_g h_t)        x += W_o y

Then x += W_3 (s(W_1 h) * W_2 h), with h = RMSNorm(new x). The gate a_t makes the matrix S decay. The layer equals the
linear layer of Qwen3-Next. Options switch parts off: without `decays` (a = 1), the layer is DeltaNet; without
`corrects` (adding v_t k_t^T to a_t S_(t-1)), gated linear attention with one gate per head; without both, linear
attention. `convolution` and `output_gate` can be switched off, too. With `negative_eigenvalues`, b_t is twice as large:
S_(t-1) is then multiplied along k_t by a number between -1 and 1, so that the layer can count modulo 2 (parity).

State: each head keeps the matrix S and the last three inputs of the convolution.

When to use: Gated DeltaNet can look up single earlier tokens with a state of fixed size. If a key occurs again, its new
value replaces the stored value. A matrix holds as many pairs of key and value as a key has numbers; further pairs
disturb the stored pairs. The state is much larger than ELiTA's, and training computes several products for each chunk
of 64 tokens.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, silu

from multilin.architectures.base import Architecture, LayerOptions, Preset, Sizes, TrainingDefaults
from multilin.errors import InputError
from multilin.layers import Layout, Linear, ParameterHolder, Reader, Reading, ResidualBlock, head_width
from multilin.layers.short_convolution import ShortConvolution
from multilin.ops.delta_rule import DeltaRuleState, delta_rule, delta_rule_weights
from multilin.settings import settings
from multilin.settings.bounds import Multiple, Width

EPS = 1e-6  # added to mean squares and squared lengths
DECAYS, STEPS = (0.01, 16.0), (1e-3, 0.1)  # ranges of the initial A (uniform) and softplus(d) (log-uniform)
MEANING = (
    "A weight is the factor of the token's values in the head's result: how well query and key fit, reduced by decay "
    "and by later tokens with similar keys. It may be negative, and is no share."
)


@settings
class GatedDeltaNetOptions(LayerOptions):
    """Options of one layer, or of a whole model."""

    num_heads: Multiple = 4  # number of heads; it must divide the hidden size
    value_size: Width | None = None  # width of a head's values; null is hidden size / heads
    decays: bool = True  # multiply the matrix by the gate a at every token
    corrects: bool = True  # a token replaces the value stored under its key; otherwise it adds to this value
    negative_eigenvalues: bool = False  # let rates b reach 2, which reflects the value stored under a key
    convolution: Multiple | None = 4  # tokens that the convolution of queries, keys and values reads; null: not used
    output_gate: bool = True  # multiply the result by a gate that the current token computes


class GatedDeltaNetState(NamedTuple):
    """The last inputs of the convolution, and the matrices."""

    inputs_BSD: Tensor | None
    matrices: DeltaRuleState


class Decays(ParameterHolder):
    """log a_t = -A softplus(w_a . h_t + d) for each head, in float32 or better."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.steps = Linear(hidden_size, num_heads, bias=False)  # w_a
        self.step_bias = nn.Parameter(torch.empty(num_heads))  # d
        self.log_factor = nn.Parameter(torch.empty(num_heads))  # log A

    def forward(self, h_BTD: Tensor) -> Tensor:
        """(B, T, D) to (B, T, H)."""
        dtype = torch.promote_types(h_BTD.dtype, torch.float32)
        steps_BTH = self.steps(h_BTD).to(dtype) + self.step_bias
        return self.log_factor.to(dtype).exp() * logsigmoid(-steps_BTH)  # softplus has a wrong gradient if compiled

    @torch.no_grad()
    def initialize(self, std: float) -> None:
        """Draw the parameters as in the source: heads remember for between one and a hundred thousand tokens."""
        self.log_factor.uniform_(*DECAYS).log_()
        steps_H = self.step_bias.uniform_(*map(math.log, STEPS)).exp()
        self.step_bias.copy_(steps_H + torch.log(-torch.expm1(-steps_H)))


class GatedDeltaNet(Reader):
    """W_o y: see the top of this file."""

    def __init__(self, hidden_size: int, options: GatedDeltaNetOptions) -> None:
        super().__init__()
        if options.negative_eigenvalues and not options.corrects:
            raise InputError(
                "negative_eigenvalues: true given, but there are no rates without `corrects`; leave it out"
            )
        num_heads, self.key_size = options.num_heads, head_width(hidden_size, options.num_heads)
        value_size = options.value_size or self.key_size
        self.num_heads, self.widths = num_heads, [hidden_size, hidden_size, num_heads * value_size]
        self.projections = Linear(hidden_size, sum(self.widths), bias=False)  # W_q, W_k, W_v
        self.convolution = ShortConvolution(sum(self.widths), options.convolution) if options.convolution else None
        self.decays = Decays(hidden_size, num_heads) if options.decays else None
        self.rates = Linear(hidden_size, num_heads, bias=False) if options.corrects else None  # w_b
        self.largest_rate = 2.0 if options.negative_eigenvalues else 1.0
        self.norm = nn.RMSNorm(value_size, eps=EPS)
        self.output_gate = Linear(hidden_size, self.widths[2], bias=False) if options.output_gate else None  # W_g
        self.output = Linear(self.widths[2], hidden_size, bias=False)  # W_o

    def forward(self, h_BTD: Tensor, state: GatedDeltaNetState | None, layout: Layout) -> tuple[Tensor, Any]:
        """The output (B, T, D), and the state."""
        inputs, matrices = state or (None, None)
        mixed = self.projections(h_BTD)
        if self.convolution is not None:
            mixed, inputs = self.convolution(mixed, inputs, layout)
        parts = silu(mixed).split(self.widths, dim=-1)
        q_BTHK, k_BTHK, v_BTHE = (x.unflatten(-1, (self.num_heads, -1)) for x in parts)
        read_BTHE, matrices = self.delta_rule(
            _normalize(q_BTHK) * self.key_size**-0.5, _normalize(k_BTHK), v_BTHE, matrices, layout,
            log_decays=None if self.decays is None else self.decays(h_BTD),
            rates=None if self.rates is None else self.largest_rate * torch.sigmoid(self.rates(h_BTD)),
        )  # fmt: skip
        y_BTD = self.norm(read_BTHE.to(self.norm.weight.dtype)).flatten(2)
        if self.output_gate is not None:
            y_BTD = y_BTD * silu(self.output_gate(h_BTD))
        return self.output(y_BTD), GatedDeltaNetState(inputs, matrices) if layout.needs_state else None

    def delta_rule(
        self, q_BTHK: Tensor, k_BTHK: Tensor, v_BTHE: Tensor, state: Any, layout: Layout, **options: Any
    ) -> tuple[Tensor, Any]:
        """Call the op `delta_rule`: the values read (B, T, H, E), and the state."""
        options |= {"padding": layout.padding_BT, "starts": layout.starts_BT}
        self.record(lambda: Reading(MEANING, delta_rule_weights(q_BTHK, k_BTHK, **options), 0, None, is_share=False))
        return delta_rule(q_BTHK, k_BTHK, v_BTHE, **options, state=state, needs_state=layout.needs_state)


class SwishFeedForward(nn.Module):
    """y = W_3 (s(W_1 x) * W_2 x), s = swish. It has as many weights as a feed-forward of width 4 D without a gate."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.expand = Linear(hidden_size, 2 * (8 * hidden_size // 3), bias=False)  # W_1, W_2
        self.contract = Linear(8 * hidden_size // 3, hidden_size, bias=False)  # W_3

    def forward(self, x_BTD: Tensor) -> Tensor:
        """The output (B, T, D)."""
        gate, values = self.expand(x_BTD).chunk(2, dim=-1)
        return self.contract(silu(gate) * values)


class GatedDeltaNetLayer(ResidualBlock):
    """Gated DeltaNet, then a gated feed-forward; each reads an RMSNorm of x and is added to x."""

    def __init__(self, hidden_size: int, options: GatedDeltaNetOptions) -> None:
        parts = GatedDeltaNet(hidden_size, options), SwishFeedForward(hidden_size)
        super().__init__(partial(nn.RMSNorm, hidden_size, eps=EPS), *parts)


def _normalize(x: Tensor) -> Tensor:
    """The vectors of x scaled to length 1, in float32 or better."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + EPS)


def preset(sizes: Sizes, choices: GatedDeltaNetOptions) -> Preset:
    """A model of equal layers without positions, so that texts have no limit."""
    return Preset(
        layers=[choices] * sizes.num_layers,
        model={"n_positions": None},
        training=TrainingDefaults(learning_rate=4e-4, betas=(0.9, 0.95), weight_decay=0.1, schedule="cosine"),
    )


architecture = Architecture(
    name="gated_deltanet",
    title="Gated DeltaNet",
    source="Gated Delta Networks (arXiv 2412.06464, 2411.12537); the linear layer of Qwen3-Next",
    layer=GatedDeltaNetLayer,
    options=GatedDeltaNetOptions,
    preset_options=GatedDeltaNetOptions,
    preset=preset,
    variants={
        "negative eigenvalues": {"negative_eigenvalues": True, "num_heads": 2},
        "deltanet": {"decays": False, "output_gate": False, "value_size": 7},
        "gated linear attention": {"corrects": False, "convolution": 2},
        "linear attention": {"decays": False, "corrects": False, "convolution": None, "output_gate": False},
    },
)
