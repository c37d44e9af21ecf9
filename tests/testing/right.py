"""Layers without a fault, in the styles in which people write them."""

import torch
from torch import Tensor, nn
from torch.nn.functional import elu, pad, scaled_dot_product_attention, silu

from tests.testing.faulty import Convolution, Ema


class Gru(nn.Module):
    def __init__(self, hidden_size: int, depth: int = 1) -> None:
        super().__init__()
        self.gru = nn.GRU(hidden_size, hidden_size, depth, batch_first=True)

    def forward(self, x, state=None):
        y, state = self.gru(x, None if state is None else state.transpose(0, 1).contiguous())
        return y, state.transpose(0, 1)


class Lstm(nn.Module):
    """The state is a pair; dropout between its two layers."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(hidden_size, hidden_size, 2, batch_first=True, dropout=0.1)

    def forward(self, x, state=None):
        given = None if state is None else tuple(part.transpose(0, 1).contiguous() for part in state)
        y, (h, c) = self.lstm(x, given)
        return y, (h.transpose(0, 1), c.transpose(0, 1))


class Attention(nn.Module):
    """Without a state, with learned positions, heads and dropout."""

    def __init__(self, hidden_size: int, num_heads: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        self.read, self.write = nn.Linear(hidden_size, 3 * hidden_size), nn.Linear(hidden_size, hidden_size)
        self.positions = nn.Embedding(4200, hidden_size)
        self.num_heads, self.dropout = num_heads, dropout

    def forward(self, x, positions):
        parts = self.read(x + self.positions(positions)).chunk(3, -1)
        heads = [part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts]
        rate = self.dropout if self.training else 0.0
        return self.write(
            scaled_dot_product_attention(*heads, dropout_p=rate, is_causal=True).transpose(1, 2).flatten(2)
        )


class CachedAttention(nn.Module):
    """The state grows; weights fall with the distance (ALiBi); masked by hand."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.read, self.write = nn.Linear(hidden_size, 3 * hidden_size), nn.Linear(hidden_size, hidden_size)
        self.slope = nn.Parameter(torch.ones(()))

    def forward(self, x, state=None):
        queries, keys, values = self.read(x).chunk(3, -1)
        if state is not None:
            keys, values = torch.cat([state["keys"], keys], 1), torch.cat([state["values"], values], 1)
        distance = torch.arange(keys.shape[1] - x.shape[1], keys.shape[1])[:, None] - torch.arange(keys.shape[1])
        scores = queries @ keys.mT / x.shape[-1] ** 0.5 - self.slope * distance
        weights = scores.masked_fill(distance < 0, -torch.inf).softmax(-1)
        return self.write(weights @ values), {"keys": keys, "values": values}


class WindowedAttention(CachedAttention):
    """The state stops growing after eight tokens."""

    def forward(self, x, state=None):
        queries, keys, values = self.read(x).chunk(3, -1)
        if state is not None:
            keys, values = torch.cat([state[0], keys], 1), torch.cat([state[1], values], 1)
        distance = torch.arange(keys.shape[1] - x.shape[1], keys.shape[1])[:, None] - torch.arange(keys.shape[1])
        scores = queries @ keys.mT / x.shape[-1] ** 0.5 - self.slope * distance
        weights = scores.masked_fill((distance < 0) | (distance > 8), -torch.inf).softmax(-1)
        return self.write(weights @ values), (keys[:, -8:].clone(), values[:, -8:].clone())


class LinearAttention(nn.Module):
    """elu + 1 as features; the state is the sum of outer products and of keys."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.read, self.write = nn.Linear(hidden_size, 3 * hidden_size), nn.Linear(hidden_size, hidden_size)

    def forward(self, x, state=None):
        queries, keys, values = self.read(x).chunk(3, -1)
        queries, keys = elu(queries) + 1, elu(keys) + 1
        products, sums = keys[..., None] * values[..., None, :], keys
        if state is not None:
            products = torch.cat([state[0][:, None], products], 1)
            sums = torch.cat([state[1][:, None], sums], 1)
        products, sums = products.cumsum(1)[:, -x.shape[1] :], sums.cumsum(1)[:, -x.shape[1] :]
        top, bottom = (queries[..., None, :] @ products)[..., 0, :], (queries * sums).sum(-1, keepdim=True)
        return self.write(top / (bottom + 1e-6)) + values, (products[:, -1].clone(), sums[:, -1].clone())


class S4d(nn.Module):
    """A diagonal state space with complex numbers, as a recurrence."""

    def __init__(self, hidden_size: int, state_size: int = 4) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.rand(hidden_size, state_size))
        self.angle = nn.Parameter(torch.arange(1.0, state_size + 1).expand(hidden_size, -1).clone())
        self.read = nn.Parameter(torch.randn(hidden_size, state_size, 2))
        self.skip = nn.Parameter(torch.ones(hidden_size))

    def forward(self, x, state=None):
        decay, read = torch.exp(torch.complex(-self.rate.exp(), self.angle)), torch.view_as_complex(self.read)
        state = torch.zeros(len(x), *decay.shape, dtype=decay.dtype) if state is None else state
        outputs = []
        for now in x.unbind(1):
            state = decay * state + now[..., None]
            outputs.append((state * read).sum(-1).real)
        return torch.stack(outputs, 1) + self.skip * x, state


class LongConvolution(nn.Module):
    """A kernel as long as the text, multiplied by FFT; no state."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(hidden_size, 1) / 2)
        self.decay, self.gate = nn.Parameter(torch.rand(hidden_size)), nn.Linear(hidden_size, hidden_size)

    def forward(self, x):
        length, time = x.shape[1], torch.arange(x.shape[1])
        kernel = self.kernel * torch.exp(-self.decay.exp()[:, None] * time)
        product = torch.fft.rfft(kernel.to(x.dtype), 2 * length) * torch.fft.rfft(x.mT, 2 * length)
        return torch.fft.irfft(product, 2 * length)[..., :length].mT * silu(self.gate(x))


class ConvolutionAndGate(Convolution):
    """With a gate; the state is a list."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size)
        self.gate = nn.Linear(hidden_size, hidden_size)

    def forward(self, x, state=None):
        output, last = super().forward(x, None if state is None else state[0])
        return output * silu(self.gate(x)), [last.clone()]


class StatelessConvolution(nn.Module):
    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(hidden_size, hidden_size, 4)

    def forward(self, x):
        return self.convolution(pad(x.mT, (3, 0))).mT


class DeltaRule(nn.Module):
    """A matrix that is corrected at every key, with normalised keys, in a loop; a new text clears it."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.read = nn.Linear(hidden_size, 3 * hidden_size + 1)

    def forward(self, x, state=None, starts=None):
        queries, keys, values, rate = self.read(x).split([x.shape[-1]] * 3 + [1], -1)
        keys, rate, outputs = nn.functional.normalize(keys, dim=-1), rate.sigmoid(), []
        matrix = keys.new_zeros(len(x), x.shape[-1], x.shape[-1]) if state is None else state
        begins = [None] * x.shape[1] if starts is None else starts.unbind(1)
        for begin, query, key, value, size in zip(
            begins, *(part.unbind(1) for part in (queries, keys, values, rate)), strict=True
        ):
            if begin is not None:
                matrix = torch.where(begin[:, None, None], 0.0, matrix)
            error = value - (matrix @ key[..., None])[..., 0]
            matrix = matrix + size[..., None] * error[..., None] * key[:, None]
            outputs.append((matrix @ query[..., None])[..., 0])
        return torch.stack(outputs, 1), matrix


class GatedEma(nn.Module):
    """Gates from the input; the recurrence runs in float32, as many write it, on a norm that starts at zero."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.gate, self.value = nn.Linear(hidden_size, hidden_size), nn.Linear(hidden_size, hidden_size)
        self.output = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.output.weight)

    def forward(self, x, state=None):
        gates, values = self.gate(x).sigmoid().float(), self.value(x).float()
        average, outputs = torch.zeros_like(values[:, 0]) if state is None else state["average"], []
        for gate, value in zip(gates.unbind(1), values.unbind(1), strict=True):
            average = gate * average + (1 - gate) * value
            outputs.append(average)
        return self.output(torch.stack(outputs, 1).to(x.dtype)), {"average": average, "more": None}


class RunningMean(nn.Module):
    """No parameters but a scale; the state counts the tokens."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(hidden_size))
        self.register_buffer("one", torch.ones(1), persistent=False)

    def forward(self, x, state=None):
        total, count = (torch.zeros_like(x[:, 0]), self.one.expand(len(x)) * 0) if state is None else state
        totals = torch.cat([total[:, None], x], 1).cumsum(1)[:, 1:]
        counts = count[:, None] + torch.arange(1, x.shape[1] + 1)
        means = totals / counts[..., None]
        return self.scale * (x - means), (totals[:, -1].clone(), counts[:, -1].clone())


class ShiftedMixer(nn.Module):
    """RWKV's shift: a learned mean of the token and the one before, then a gate."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.mix, self.read = nn.Parameter(torch.rand(hidden_size)), nn.Linear(hidden_size, 2 * hidden_size)

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        before = torch.cat([torch.zeros_like(x[:, :1]) if state is None else state[:, None], x[:, :-1]], 1)
        value, gate = self.read(self.mix * x + (1 - self.mix) * before).chunk(2, -1)
        return torch.sigmoid(gate) * value, x[:, -1].clone()


class Multihead(nn.Module):
    """PyTorch's own module, which has a fast path in evaluation, with learned positions up to 512 and a mask."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(hidden_size, 2, dropout=0.1, batch_first=True)
        self.positions = nn.Parameter(torch.randn(512, hidden_size) / 10)
        self.register_buffer("mask", torch.ones(512, 512).triu(1).bool(), persistent=False)

    def forward(self, x):
        x, mask = x + self.positions[: x.shape[1]], self.mask[: x.shape[1], : x.shape[1]]
        return self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]


class EncoderLayer(nn.Module):
    """A whole layer of PyTorch, in a residual block of its own; it reads at most 128 tokens."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(hidden_size, 2, 64, batch_first=True, norm_first=True)
        self.positions = nn.Embedding(128, hidden_size)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.layer(x + self.positions(torch.arange(x.shape[1])), src_mask=mask, is_causal=True)


class LogScan(nn.Module):
    """minGRU by a scan in log space."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.read = nn.Linear(hidden_size, 2 * hidden_size)

    def forward(self, x, state=None):
        gate, value = self.read(x).chunk(2, -1)
        positive = (nn.functional.relu(value) + 0.5).log()
        logs = nn.functional.logsigmoid(gate) + torch.where(value >= 0, positive, nn.functional.logsigmoid(value))
        decays = -nn.functional.softplus(gate)
        if state is not None:
            logs, decays = torch.cat([state[:, None], logs], 1), pad(decays, (0, 0, 1, 0))
        total = decays.cumsum(1)
        last = (total + (logs - total).logcumsumexp(1))[:, -x.shape[1] :]
        return last.exp(), last[:, -1].clone()


class ChunkedLinearAttention(nn.Module):
    """Chunks of 16 tokens by products of matrices, as a kernel would; norms in float32."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.read, self.scale = nn.Linear(hidden_size, 3 * hidden_size), nn.Parameter(torch.ones(hidden_size))

    def forward(self, x, state=None):
        width, length = x.shape[-1], x.shape[1]
        parts = pad(self.read(x), (0, 0, 0, -length % 16)).unflatten(1, (-1, 16)).chunk(3, -1)
        matrix = x.new_zeros(len(x), width, width) if state is None else state
        mask, outputs = torch.ones(16, 16).tril().to(x), []
        for queries, keys, values in zip(*(part.unbind(1) for part in parts), strict=True):
            outputs.append(queries @ matrix + (queries @ keys.mT * mask) @ values)
            kept = min(16, length - 16 * (len(outputs) - 1))
            matrix = matrix + keys[:, :kept].mT @ values[:, :kept]
        y = torch.cat(outputs, 1)[:, :length].float()
        return (y * (y.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype) * self.scale, matrix


class ComplexSsm(nn.Module):
    """A parameter and a state in complex64, whatever the dtype of the input."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.polar(torch.full((hidden_size,), 0.8), torch.rand(hidden_size)))
        self.value = nn.Linear(hidden_size, hidden_size)

    def forward(self, x, state=None):
        state, outputs = torch.zeros_like(x[:, 0], dtype=torch.complex64) if state is None else state, []
        for value in self.value(x).to(torch.complex64).unbind(1):
            state = self.decay * state + value
            outputs.append(state.real)
        return torch.stack(outputs, 1).to(x.dtype), state


RIGHT = (
    Attention, CachedAttention, ChunkedLinearAttention, ComplexSsm, Convolution, ConvolutionAndGate, DeltaRule, Ema,
    EncoderLayer, GatedEma, Gru, LinearAttention, LogScan, LongConvolution, Lstm, Multihead, RunningMean, S4d,
    ShiftedMixer, StatelessConvolution, WindowedAttention,
)  # fmt: skip
QUADRATIC = (Attention, CachedAttention, Multihead, WindowedAttention)  # in the work of a step
MAY_WARN = {RunningMean: {"learns"}}  # which token came before cannot be told from a mean
