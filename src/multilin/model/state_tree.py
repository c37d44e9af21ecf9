"""States of layers as (nested) NamedTuples of tensors: every tensor by its name, changed, or some of its rows."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor


def map_tensors(function: Callable[[Tensor], Tensor], state: Any) -> Any:
    """Apply a function to every tensor of a (nested) NamedTuple."""
    if isinstance(state, Tensor):
        return function(state)
    if state is None or isinstance(state, int):
        return state
    return type(state)(*(map_tensors(function, part) for part in state))


def named_tensors(state: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a (nested) NamedTuple with its dotted name."""
    if isinstance(state, Tensor):
        yield name, state
    elif state is not None:
        for field, part in zip(state._fields, state, strict=True):
            yield from named_tensors(part, f"{name}.{field}")


def with_tensors(state: Any, name: str, tensors: Mapping[str, Tensor]) -> Any:
    """The same (nested) NamedTuple with the tensors of these dotted names."""
    if isinstance(state, Tensor):
        return tensors[name]
    if state is None:
        return None
    parts = zip(state._fields, state, strict=True)
    return type(state)(*(with_tensors(part, f"{name}.{field}", tensors) for field, part in parts))


def put_rows(states: list[Any], parts: list[Any], rows: Tensor) -> list[Any]:
    """The states with `rows` replaced by the rows of `parts`, in order."""

    def put(state: Any, part: Any) -> Any:
        if isinstance(state, Tensor):
            return state.index_copy(0, rows, part.to(state.dtype))
        return None if state is None else type(state)(*map(put, state, part))

    return list(map(put, states, parts))
