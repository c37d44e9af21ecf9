"""What the laws are checked on: layers or a whole model, as a function of tokens and a state."""

import copy
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from multilin.layers.base import Layout
from multilin.model import MultilinForCausalLM, TextState


class Subject(ABC):
    """A module that reads tokens and a state; the laws call it only by these methods.

    module: the layers or the model. It is used as it is: in the mode, dtype and weights that it has.
    longest: the most tokens that it reads; None for no limit.
    scales: sizes of a changed token; above 1 only for vectors.
    tolerance: largest relative difference between two ways to compute the same output.
    """

    scales: tuple[float, ...] = (1.0,)

    def __init__(self, module: nn.Module, longest: int | None = None) -> None:
        self.module, self.longest = module, longest
        self.tolerance = 1e-10 if self.dtype == torch.float64 else 1e-4

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        kinds = (p.dtype for p in self.module.parameters() if p.is_floating_point())
        return next(kinds, torch.get_default_dtype())

    def cast(self, dtype: torch.dtype) -> "Subject":
        """A copy with weights of this dtype; its tolerance is larger if it still computes in another dtype."""
        other = copy.copy(self)
        other.module = copy.deepcopy(self.module).to(dtype)
        other.tolerance = 1e-10 if dtype == torch.float64 else 1e-4
        with torch.no_grad(), _LowestPrecision() as watch:
            other.read(other.draw(1, 3))
        other.tolerance = max(other.tolerance, 1e3 * torch.finfo(watch.lowest).eps if watch.lowest else 0.0)
        return other

    @abstractmethod
    def draw(self, rows: int, length: int, seed: int = 1) -> Tensor:
        """Random tokens: (B, T) ids or (B, T, D) vectors."""

    @abstractmethod
    def read(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """The output (B, T, ...) and the state after the tokens; the given state stays as it is."""

    @abstractmethod
    def select(self, state: Any, rows: list[int]) -> Any:
        """The state of these rows."""

    @abstractmethod
    def tensors(self, state: Any) -> list[Tensor]:
        """The tensors of a state."""

    def read_pieces(self, x: Tensor, cuts: list[int]) -> tuple[Tensor, Any]:
        """Read in pieces that end at the cuts."""
        outputs, state = [], None
        for piece in x.tensor_split(cuts, dim=1):
            output, state = self.read(piece, state)
            outputs.append(output)
        return torch.cat(outputs, dim=1), state


class LayerSubject(Subject):
    """Modules called with (x, state, layout), one after another, as layers of a model are."""

    scales = (1.0, 1e3, 1e8, 1e30)

    def __init__(self, *layers: nn.Module, width: int, longest: int | None = None) -> None:
        self.width = width
        super().__init__(nn.ModuleList(layers), longest)

    def draw(self, rows: int, length: int, seed: int = 1) -> Tensor:
        """(B, T, D), normally distributed."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(rows, length, self.width, generator=generator, dtype=torch.float64).to(self.dtype)

    def read(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """The state is the number of tokens, and the state of each layer."""
        first, states = state or (0, [None] * len(self.module))  # type: ignore[arg-type]
        positions_BT = torch.arange(first, first + x.shape[1]).expand(x.shape[:2])
        after, x = [], x.clone()
        for layer, value in zip(self.module, states, strict=True):  # type: ignore[call-overload]
            x, value = layer(x, value, Layout(positions_BT))
            after.append(value)
        return x, (first + positions_BT.shape[1], after)

    def select(self, state: Any, rows: list[int]) -> Any:
        """The state of these rows."""
        return state[0], tree_map(lambda part: part[rows] if isinstance(part, Tensor) else part, state[1])

    def tensors(self, state: Any) -> list[Tensor]:
        """The tensors of a state, without the module's own count of sizes."""
        values = [getattr(value, "value", value) for value in state[1]]
        return [part for part in tree_leaves(values) if isinstance(part, Tensor)]


class ModelSubject(Subject):
    """A language model, which reads ids and gives logits."""

    module: MultilinForCausalLM

    def __init__(self, model: MultilinForCausalLM) -> None:
        super().__init__(model, model.config.n_positions)

    def draw(self, rows: int, length: int, seed: int = 1) -> Tensor:
        """(B, T) ids, without the first two, which may end a text or pad it."""
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
    """The lowest precision that a number of a float64 or float32 tensor is rounded to."""

    lowest: torch.dtype | None = None

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.is_floating_point() and args and isinstance(args[0], Tensor):
            given, lowest = args[0].dtype, torch.finfo(self.lowest or torch.float64).eps
            if given.is_floating_point and lowest < torch.finfo(result.dtype).eps > torch.finfo(given).eps:
                self.lowest = result.dtype
        return result
