"""A plain PyTorch module as the mixer of a layer: its state may be any nest of tensors, of any size, or absent."""

import inspect
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from multilin.errors import InputError
from multilin.layers.base import Layout
from multilin.ops.dispatch import can_read_values, warn_once
from multilin.ops.shapes import kind_of


@dataclass(frozen=True)
class Signature:
    """What the `forward` of a plain module takes besides x.

    has_state: whether it takes `state` and returns (output, new state).
    takes_starts, takes_positions: whether it takes the arguments `starts` and `positions`.
    """

    has_state: bool
    takes_starts: bool
    takes_positions: bool

    @classmethod
    def of(cls, module: type[nn.Module]) -> "Signature":
        """The signature of a class.

        Raises:
            InputError: `forward` needs another argument.
        """
        parameters = list(inspect.signature(module.forward).parameters.values())[1:]
        for parameter in parameters[1:]:
            is_needed = parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
            if is_needed and parameter.name not in ("state", "starts", "positions"):
                raise InputError(
                    f"model.architecture: {module.__name__}.forward needs the argument {parameter.name!r}, but a layer "
                    "gets only x, state, starts and positions"
                )
        names = {parameter.name for parameter in parameters}
        return cls("state" in names, "starts" in names, "positions" in names)


class PlainState(NamedTuple):
    """The state of a plain module for each row.

    sizes_BN: int64. First 1 for a row that has begun, else 0; then the lengths of all axes but the first of each tensor
        of the row. Tensors are padded to the longest row, because some states grow with the text.
    value: what the module returned, or without a state the tensors that it has read.
    """

    sizes_BN: Tensor
    value: Any


def has_plain_modules(model: nn.Module) -> bool:
    """Whether a layer of the model is a plain module."""
    return any(isinstance(module, PlainMixer) for module in model.modules())


class PlainMixer(nn.Module):
    """Call a plain module, for rows that have read different numbers of tokens, with padding, in any pieces.

    The module has one of these forms, with x and output (B, T, D):

        forward(x) -> output
        forward(x, state=None) -> (output, new state)

    The state is any nest of tuples, lists and dictionaries of tensors whose first axis is the batch; it is None at the
    start of a text. Without a state, the mixer keeps what was read, and the module reads it again. `forward` may also
    take `starts`, (B, T) bool, True where a new text begins inside a row, or None; and `positions`, (B, T) int64, the
    position of each token in its text.

    Args:
        module: class of the module.
        hidden_size: D, the first argument of the class.
        options: the other arguments of the class.

    Raises:
        InputError: the module cannot be made with these options.
    """

    def __init__(self, module: type[nn.Module], hidden_size: int, options: dict[str, Any]) -> None:
        super().__init__()
        self.hidden_size, self.signature = hidden_size, Signature.of(module)
        self._make = partial(module, hidden_size, **options)
        self.name = module.__name__
        try:
            self.module = self._make()
        except InputError:
            raise
        except Exception as error:
            chosen = ", ".join(f"{name}={value!r:.40}" for name, value in options.items())
            raise InputError(
                f"model.options: {module.__name__}({hidden_size}{', ' if chosen else ''}{chosen}) fails "
                f"({type(error).__name__}: {error})"
            ) from error
        for part in self.module.modules():
            part.keeps_own_weights = True  # type: ignore[assignment]

    def restore_unsaved(self) -> None:
        """Compute again the tensors that are not saved with the weights: other buffers and plain attributes."""
        fresh: nn.Module | None = None
        for name, part in self.module.named_modules():
            lost = [*part._non_persistent_buffers_set, *(k for k, v in vars(part).items() if isinstance(v, Tensor))]
            for key in lost:
                if fresh is None:
                    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
                        fresh = self._make()
                old, new = getattr(part, key), getattr(fresh.get_submodule(name), key)
                device = next((p.device for p in self.module.parameters()), torch.device("cpu"))
                setattr(part, key, None if new is None else new.to(device, getattr(old, "dtype", new.dtype)))

    def forward(self, x_BTD: Tensor, state: PlainState | None, layout: Layout) -> tuple[Tensor, PlainState | None]:
        """The output (B, T, D), and the state, None if the layout needs none."""
        given: dict[str, Any] = {}
        if self.signature.takes_starts:
            given["starts"] = layout.starts_BT
        if self.signature.takes_positions:
            given["positions"] = layout.positions_BT
        if not can_read_values(x_BTD):
            return self._read_traced(x_BTD, state, given, layout)
        if layout.padding_BT is None and (state is None or _is_even(state)):
            output_BTD, value = self._call(x_BTD, None if state is None else _trimmed(state, slice(None)), given)
            return output_BTD, _state(value, x_BTD) if layout.needs_state else None
        return self._read_groups(x_BTD, state, given, layout)

    def _call(self, x_BTD: Tensor, value: Any, given: dict[str, Any]) -> tuple[Tensor, Any]:
        """Output and new value for rows that have read equally much; `value` is None at the start of a text."""
        if self.signature.has_state:
            result = self.module(x_BTD, state=value, **given)
            if not isinstance(result, tuple) or len(result) != 2:
                raise InputError(f"layer {self.name}: forward with a state must return (output, new state)")
            output_BTD, value = result
        else:
            if value is not None:
                warn_once(
                    f"layer {self.name} has no state, so each new token reads the whole text again; give its forward "
                    "a state to make the cost per token constant"
                )
            value = _append(value, {"x": x_BTD, **given})
            read_BTD, *others = value.values()
            output_BTD = self.module(read_BTD, **dict(zip(given, others, strict=True)))
            if isinstance(output_BTD, Tensor):
                output_BTD = output_BTD[:, -x_BTD.shape[1] :]
        if not isinstance(output_BTD, Tensor) or output_BTD.shape != x_BTD.shape:
            raise InputError(
                f"layer {self.name}: the output is {kind_of(output_BTD)}, but it must be a tensor of shape "
                f"{tuple(x_BTD.shape)}, as x"
            )
        self._check_state(value, x_BTD.shape[0])
        return output_BTD, value

    def _check_state(self, value: Any, num_rows: int) -> None:
        for part in tree_flatten(value)[0]:
            if part is not None and not (isinstance(part, Tensor) and part.ndim and part.shape[0] == num_rows):
                raise InputError(
                    f"layer {self.name}: the state holds {kind_of(part)}, but each part must be a tensor whose first "
                    f"axis is the batch, here {num_rows}"
                )

    def _read_groups(
        self, x_BTD: Tensor, state: PlainState | None, given: dict[str, Any], layout: Layout
    ) -> tuple[Tensor, PlainState | None]:
        """Rows with equally large states and equally many new tokens are read together, without padding."""
        num_rows, num_time = x_BTD.shape[:2]
        padding_BT = torch.zeros_like(layout.positions_BT).bool() if layout.padding_BT is None else layout.padding_BT
        columns_BT = padding_BT.int().argsort(dim=1, stable=True)  # tokens first
        counts_B1 = num_time - padding_BT.sum(dim=1, keepdim=True)
        if not layout.needs_state and state is None:
            counts_B1 = counts_B1.amax().expand(num_rows, 1)  # padding after the tokens changes nothing
        sizes_BN = torch.zeros_like(counts_B1) if state is None else state.sizes_BN
        keys, group_B = torch.cat([counts_B1, sizes_BN], dim=1).unique(dim=0, return_inverse=True)
        output_BTD, pieces = torch.zeros_like(x_BTD), []
        for group, key in enumerate(keys.tolist()):
            rows = (group_B == group).nonzero()[:, 0]
            value = _trimmed(state, rows) if state is not None and key[1] else None
            if key[0]:
                place = rows[:, None], columns_BT[rows, : key[0]]
                own = {name: None if part is None else part[place] for name, part in given.items()}
                read_BTD, value = self._call(x_BTD[place], value, own)
                output_BTD = output_BTD.index_put(place, read_BTD.to(x_BTD.dtype))
            pieces.append((rows, value))
        return output_BTD, _merged(pieces, num_rows, x_BTD.device) if layout.needs_state else None

    def _read_traced(
        self, x_BTD: Tensor, state: PlainState | None, given: dict[str, Any], layout: Layout
    ) -> tuple[Tensor, PlainState | None]:
        """In graphs and compiled code, which cannot look at numbers: every row has the same size of state.

        A row that has not begun reads from None; with padding, tokens are read one by one.
        """
        if layout.padding_BT is None:
            return self._step(x_BTD, state, given, None, layout.needs_state)
        outputs = []
        for time in range(x_BTD.shape[1]):
            now = slice(time, time + 1)
            begins = time == 0 or not torch.compiler.is_exporting()  # in graphs, padding only follows tokens
            own = {name: None if part is None else part[:, now] for name, part in given.items()}
            output, state = self._step(x_BTD[:, now], state, own, layout.padding_BT[:, time], True, begins)
            outputs.append(output)
        return torch.cat(outputs, dim=1), state if layout.needs_state else None

    def _step(
        self,
        x_BTD: Tensor,
        state: PlainState | None,
        given: dict[str, Any],
        is_idle_B: Tensor | None,
        needs_state: bool,
        may_begin: bool = True,
    ) -> tuple[Tensor, PlainState | None]:
        """Read tokens in a row that has begun or, if it `may_begin`, has not; `is_idle_B` marks rows to leave alone."""
        is_known = state is not None and not may_begin
        first_BTD, first = self._call(x_BTD, state.value if state is not None and is_known else None, given)
        begun = _state(first, x_BTD)
        if state is not None and not is_known:
            next_BTD, after = self._call(x_BTD, state.value, given)
            has_begun_B = state.sizes_BN[:, 0] > 0
            first_BTD = torch.where(has_begun_B[:, None, None], next_BTD, first_BTD)
            begun = begun._replace(value=_where(has_begun_B, after, first))
        if is_idle_B is not None:
            old = state or PlainState(torch.zeros_like(begun.sizes_BN), _zeros(begun.value))
            begun = PlainState(*_where(is_idle_B, tuple(old), tuple(begun)))
        return first_BTD, begun if needs_state else None


def _append(value: dict[str, Any] | None, new: dict[str, Any]) -> dict[str, Any]:
    """What a module without a state has read, with the new tokens at the end."""
    new = {name: torch.zeros_like(new["x"][..., 0]).bool() if part is None else part for name, part in new.items()}
    return new if value is None else {name: torch.cat([value[name], part], dim=1) for name, part in new.items()}


def _state(value: Any, x_BTD: Tensor) -> PlainState:
    """The state of rows that have all read equally much."""
    return PlainState(_sizes(value, x_BTD.shape[0], x_BTD.device), value)


def _sizes(value: Any, num_rows: int, device: torch.device) -> Tensor:
    """One row of `sizes_BN` for all rows."""
    tensors = (part for part in tree_flatten(value)[0] if part is not None)
    sizes = [1, *(size for part in tensors for size in part.shape[1:])]
    return torch.tensor([sizes], device=device).expand(num_rows, -1).clone()


def _is_even(state: PlainState) -> bool:
    """Whether all rows have begun, with states of the same size."""
    sizes_BN = state.sizes_BN
    return bool((sizes_BN[:, 0] > 0).all()) and (len(sizes_BN) == 1 or bool((sizes_BN == sizes_BN[:1]).all()))


def _trimmed(state: PlainState, rows: Any) -> Any:
    """The value of these rows, whose states have the same size, without padding."""
    parts, form = tree_flatten(state.value)
    sizes = iter(state.sizes_BN[rows][0].tolist()[1:])
    trimmed = []
    for part in parts:
        if part is not None:
            part = part[rows]
            for axis in range(1, part.ndim):
                part = part.narrow(axis, 0, next(sizes))
        trimmed.append(part)
    return tree_unflatten(trimmed, form)


def _merged(pieces: list[tuple[Tensor, Any]], num_rows: int, device: torch.device) -> PlainState:
    """The state of all rows from groups of rows and their values; None is the value of rows that have not begun."""
    flat = [(rows, *tree_flatten(value)) for rows, value in pieces if value is not None]
    if not flat:
        return PlainState(torch.zeros(num_rows, 1, dtype=torch.long, device=device), None)
    form: TreeSpec = flat[0][2]
    sizes_BN = torch.zeros(num_rows, len(_sizes(_first_value(pieces), 1, device)[0]), dtype=torch.long, device=device)
    merged: list[Tensor | None] = []
    for parts in zip(*(parts for _, parts, _ in flat), strict=True):
        if parts[0] is None:
            merged.append(None)
            continue
        longest = [max(part.shape[axis] for part in parts) for axis in range(1, parts[0].ndim)]
        whole = parts[0].new_zeros(num_rows, *longest)
        for (rows, _, _), part in zip(flat, parts, strict=True):
            whole[(rows, *(slice(0, size) for size in part.shape[1:]))] = part.to(whole.dtype)
        merged.append(whole)
    for rows, value in pieces:
        if value is not None:
            sizes_BN[rows] = _sizes(value, len(rows), device)
    return PlainState(sizes_BN, tree_unflatten(merged, form))


def _first_value(pieces: list[tuple[Tensor, Any]]) -> Any:
    """The first value that is not None."""
    return next(value for _, value in pieces if value is not None)


def _where(is_first_B: Tensor, first: Any, second: Any) -> Any:
    """For each row the first value, or the second."""
    firsts, form = tree_flatten(first)
    chosen = [
        None if part is None else torch.where(is_first_B.view(-1, *(1 for _ in part.shape[1:])), part, other)
        for part, other in zip(firsts, tree_flatten(second)[0], strict=True)
    ]
    return tree_unflatten(chosen, form)


def _zeros(value: Any) -> Any:
    parts, form = tree_flatten(value)
    return tree_unflatten([None if part is None else torch.zeros_like(part) for part in parts], form)
