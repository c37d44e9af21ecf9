"""Check the shapes of arguments. Kernels read by address, so a wrong shape would make them read outside of tensors."""

from typing import Any

from torch import Tensor

from multilin.errors import InputError, shown


def kind_of(value: Any) -> str:
    """Describe a value for a message, for example a tensor as `float32 of shape (2, 3)`."""
    if not isinstance(value, Tensor):
        return shown(value)
    return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"


def check_shapes(*expected: tuple[str, Tensor | None, tuple[int, ...]]) -> None:
    """Refuse arguments whose shape is not the wanted one.

    Args:
        expected: name, value and wanted shape of each argument; a value of None is not checked.
    """
    for name, tensor, shape in expected:
        if tensor is not None and tensor.shape != shape:
            raise InputError(f"{name}: shape {tuple(tensor.shape)} given, but it must be {tuple(shape)}")


def check_heads(queries: Tensor, keys: Tensor, values: Tensor) -> None:
    """Refuse queries, keys and values that are not (B, T, H, D), (B, T, H, D) and (B, T, H, E)."""
    if queries.shape != keys.shape or values.shape[:3] != keys.shape[:3]:
        raise InputError(
            f"keys: shape {tuple(keys.shape)} given for queries {tuple(queries.shape)} and values "
            f"{tuple(values.shape)}, but they must share batch, time and heads"
        )
