"""What the laws are checked on: layers or a whole model, as a function of tokens and a state."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from multilin.layers.base import Layout
from multilin.layers.plain import PlainMixer
from multilin.model import MultilinForCausalLM, TextState


def noise(like: Tensor, seed: int) -> Tensor:
    """Normally distributed numbers, which do not depend on the dtype but for rounding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like)


class Subject:
    """Modules that read (B, T, D) vectors and a state, one after another, as the layers of a model do.

    They are used as they are: in the mode, dtype and weights that they have.

    Args:
        layers: modules called with (x, state, layout).
        width: D.
        longest: the most tokens that they read; None for no limit.
    """

    scales: tuple[float, ...] = (1.0, 1e3, 1e8, 1e30)
    """Sizes of a token that is changed."""

    def __init__(self, *layers: nn.Module, width: int, longest: int | None = None) -> None:
        self.module: nn.Module = nn.ModuleList(layers)
        self.width, self.longest = width, longest
        self.rounds_to = torch.float64  # the lowest precision that it computes in

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return next((p.dtype for p in self.module.parameters() if p.is_floating_point()), torch.get_default_dtype())

    @property
    def tolerance(self) -> float:
        """The largest relative difference between two ways to compute the same output."""
        eps = max(torch.finfo(self.dtype).eps, torch.finfo(self.rounds_to).eps)
        return min(1e-10 if eps < 1e-10 else 1e3 * eps, 0.05)

    @property
    def has_state(self) -> bool:
        """False if the text is read again for each new token."""
        return all(part.signature.has_state for part in self.module.modules() if isinstance(part, PlainMixer))

    def cast(self, dtype: torch.dtype) -> "Subject":
        """A copy with weights of this dtype."""
        other = self.copy()
        other.module.to(dtype)
        with torch.no_grad(), _LowestPrecision() as watch:
            other.read(other.draw(1, 3))
        other.rounds_to = watch.lowest
        return other

    def copy(self) -> "Subject":
        """A copy with weights of its own."""
        other = copy.copy(self)
        other.module = copy.deepcopy(self.module)
        return other

    def draw(self, rows: int, length: int, seed: int = 1) -> Tensor:
        """Random tokens, (B, T, D), normally distributed."""
        return noise(torch.empty(rows, length, self.width, dtype=self.dtype), seed)

    def read(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """The output, and the state: the number of tokens and the state of each layer; the given state stays."""
        layers = list(self.module.children())
        first, states = state or (0, [None] * len(layers))
        positions_BT = torch.arange(first, first + x.shape[1]).expand(x.shape[:2])
        after, x = [], x.clone()
        for layer, value in zip(layers, states, strict=True):
            x, value = layer(x, value, Layout(positions_BT))
            after.append(value)
        return x, (first + positions_BT.shape[1], after)

    def read_pieces(self, x: Tensor, cuts: Sequence[int]) -> Tensor:
        """The output for a text that is read in pieces, which end at the cuts."""
        outputs, state = [], None
        for piece in x.tensor_split(list(cuts), dim=1):
            output, state = self.read(piece, state)
            outputs.append(output)
        return torch.cat(outputs, dim=1)

    def select(self, state: Any, rows: list[int]) -> Any:
        """The state of these rows."""
        return state[0], tree_map(lambda part: part[rows] if isinstance(part, Tensor) else part, state[1])

    def tensors(self, state: Any) -> list[Tensor]:
        """The tensors of a state, without the sizes that `PlainState` adds."""
        return [part for part in tree_leaves([getattr(v, "value", v) for v in state[1]]) if isinstance(part, Tensor)]


class ModelSubject(Subject):
    """A language model, which reads ids and gives logits."""

    module: MultilinForCausalLM
    scales = (1.0,)

    def __init__(self, model: MultilinForCausalLM) -> None:
        super().__init__(width=model.config.hidden_size, longest=model.config.n_positions)
        self.module = model

    def draw(self, rows: int, length: int, seed: int = 1) -> Tensor:
        """Random ids, (B, T), without the first two, which may end a text or pad it."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(2, self.module.config.vocab_size, (rows, length), generator=generator)

    def read(self, x: Tensor, state: TextState | None = None) -> tuple[Tensor, TextState]:
        """Logits, and a new `TextState`."""
        state = self.module.new_state() if state is None else state.clone()
        return self.module(x, past_key_values=state).logits, state

    def select(self, state: TextState, rows: list[int]) -> TextState:
        """The state of these rows."""
        return state.select(rows)

    def tensors(self, state: TextState) -> list[Tensor]:
        """All tensors of the state."""
        return [tensor for _, tensor in state.named_tensors()]


class _LowestPrecision(TorchDispatchMode):
    """The lowest precision that a more precise tensor is rounded to."""

    lowest = torch.float64

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        parts = (args[0], result) if args else (None, None)
        if all(isinstance(part, Tensor) and part.is_floating_point() for part in parts):
            given, made = (torch.finfo(part.dtype).eps for part in parts)
            if made > max(given, torch.finfo(self.lowest).eps):
                self.lowest = result.dtype
        return result
