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


RIGHT = (
    Attention, CachedAttention, Convolution, ConvolutionAndGate, DeltaRule, Ema, GatedEma, Gru, LinearAttention,
    LongConvolution, Lstm, RunningMean, S4d, ShiftedMixer, StatelessConvolution, WindowedAttention,
)  # fmt: skip
MAY_WARN = {RunningMean: "learns"}  # which token came before cannot be told from a mean
