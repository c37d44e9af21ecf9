"""States of layers as (nested) NamedTuples of tensors: every tensor by its name, changed, or some of its rows."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor


def map_tensors(function: Callable[..., Tensor], state: Any, *others: Any) -> Any:
    """Apply a function to every tensor of a (nested) NamedTuple, and to its place in others of the same form."""
    if isinstance(state, Tensor):
        return function(state, *others)
    if state is None or isinstance(state, int):
        return state
    return type(state)(*(map_tensors(function, *parts) for parts in zip(state, *others, strict=True)))


def tensors_of(states: Any) -> Iterator[Tensor]:
    """Every tensor of (nested) NamedTuples and lists of them, in order."""
    if isinstance(states, Tensor):
        yield states
    elif isinstance(states, tuple | list):
        for part in states:
            yield from tensors_of(part)


def named_tensors(state: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a (nested) NamedTuple with its dotted name."""
    if isinstance(state, Tensor):
        yield name, state
    elif state is not None:
        for field, part in zip(state._fields, state, strict=True):
            yield from named_tensors(part, f"{name}.{field}")


def put_rows(states: list[Any], parts: list[Any], rows: Tensor) -> list[Any]:
    """The states with `rows` replaced by the rows of `parts`, in order."""

    def put(old: Tensor, new: Tensor) -> Tensor:
        return old.index_copy(0, rows, new.to(old.dtype))

    return [map_tensors(put, *pair) for pair in zip(states, parts, strict=True)]
