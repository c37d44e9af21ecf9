"""The base classes of our optimizers: steps, saved states, updates of many tensors at once, and exact norms."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from multilin.errors import InputError

CACHE_NUMBERS = 2**18  # numbers of tensors that a CPU updates together, so that they stay in its cache


class CheckedOptimizer(torch.optim.Optimizer):
    """An optimizer that refuses rates out of range and states that were saved by another kind of optimizer.

    marks: settings that every group has besides the defaults.
    state_names: names that the state of a parameter has, if there is a state.
    wide_names: names of the state's tensors that are float32 or better, whatever the parameter's dtype.
    """

    marks: tuple[str, ...] = ()
    state_names: tuple[str, ...] = ()
    wide_names: tuple[str, ...] = ()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as in PyTorch.

        Raises:
            InputError: a learning rate or weight decay is negative or not finite.
        """
        for name in ("lr", "weight_decay"):
            value = param_group.get(name, self.defaults[name])
            if not 0 <= value < math.inf:
                raise InputError(f"{name}: {value} given, but it must be at least 0 and finite")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns the closure's result.

        Raises:
            InputError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        if any(parameter.grad is not None and parameter.grad.is_sparse for parameter in parameters):
            raise InputError(f"optimizer: {type(self).__name__} takes dense gradients, but a sparse one was given")
        self.update()
        return loss

    def update(self) -> None:
        """Update every parameter that has a gradient."""
        raise NotImplementedError

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a saved state as PyTorch does, but keep the tensors of `wide_names` in float32 or better.

        Raises:
            InputError: the state was saved by another kind of optimizer.
        """
        groups, states = state_dict["param_groups"], state_dict["state"]
        own = {*self.defaults, *self.marks} - {"differentiable"}  # PyTorch adds this name to no group
        kept = [({*self.state_names}, state) for state in states.values() if state]
        for expected, given in [*((own, group) for group in groups), *kept]:
            if missing := sorted(expected - given.keys()):
                raise InputError(
                    f"optimizer: the given state lacks {', '.join(missing)}, so it was not saved by "
                    f"{type(self).__name__}; continue with the optimizer that saved it"
                )
        super().load_state_dict(state_dict)
        # PyTorch casts tensors to their parameter's dtype: in bf16 a count of steps would stop at 256.
        names = [name for group in groups for name in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for name, parameter in zip(names, parameters, strict=True):
            for key in self.wide_names if states.get(name) else ():
                device, wide = self.state[parameter][key].device, torch.promote_types(parameter.dtype, torch.float32)
                self.state[parameter][key] = states[name][key].to(device, wide)


class NormalizingOptimizer(CheckedOptimizer):
    """An optimizer whose update is independent of the scale of the gradient of a tensor, or of a row.

    Tensors of parameter groups whose `rows` is true are updated row by row, other tensors as a whole. A parameter
    without a gradient is skipped, as in PyTorch; a parameter with a zero gradient is updated.

    A parameter may be divided among devices by rows (a DTensor, as FSDP2 makes it). A tensor that is updated as a whole
    then needs sums of squares over all devices. A row and its statistics are always on one device.

    Subclasses update many whole tensors at once, with PyTorch's functions for lists of tensors, but tensors of rows
    one by one. They never wait for a number from the device, and the learning rate may be a tensor, so a step can be
    captured into a CUDA graph. No state is named `step`, since PyTorch leaves such a state on the CPU when loading.
    """

    def update_whole(self, parameters: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> None:
        """Update whole tensors, after their weight decay."""
        raise NotImplementedError

    def update_rows(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """Update a tensor row by row, after its weight decay; tensor and gradient count as (rows, numbers per row)."""
        raise NotImplementedError

    def update(self) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            gradients = [parameter.grad for parameter in parameters]
            if group["rows"]:
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    _decay([parameter], group)
                    self.update_rows(parameter, gradient, group)
            else:
                for some in _cache_sized(parameters):
                    _decay(parameters[some], group)
                    self.update_whole(parameters[some], gradients[some], group)


def norms(tensors: list[Tensor]) -> list[Tensor]:
    """Frobenius norm of each tensor, over all devices if the tensor is divided, in float32 or better."""
    wide = None if tensors[0].dtype in (torch.float32, torch.float64) else torch.float32
    parts = torch._foreach_norm(local(tensors), 2, dtype=wide)
    if not isinstance(tensors[0], DTensor):
        return list(parts)
    squares = torch.stack(parts).double().square()
    dist.all_reduce(squares, group=tensors[0].device_mesh.get_group())
    return list(squares.sqrt().to(parts[0].dtype).unbind())


def local(tensors: list[Tensor]) -> list[Tensor]:
    """The part of each tensor on this device, to be changed in place; for an undivided tensor, the whole tensor."""
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def row_norms(rows: Tensor) -> Tensor:
    """(R, 1) Euclidean norms of the rows, in float32 or better."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    result: Tensor = torch.linalg.vector_norm(rows, dim=1, keepdim=True, dtype=wide)
    return result


def inverse(values: Tensor) -> Tensor:
    """1 / x where x is not 0, and 0 elsewhere."""
    zero = values == 0
    return values.masked_fill(zero, 1.0).reciprocal().masked_fill(zero, 0.0)


def as_rows(tensor: Tensor) -> Tensor:
    """A view (rows, numbers per row) of the part of a tensor on this device; a single number is one row."""
    (part,) = local([tensor])
    return part if part.ndim == 2 else part.view(*row_shape(part))


def row_shape(tensor: Tensor) -> tuple[int, int]:
    """The number of rows of a tensor, and the number of elements per row."""
    return (len(tensor), math.prod(tensor.shape[1:])) if tensor.ndim else (1, 1)


def _decay(parameters: list[Tensor], group: dict[str, Any]) -> None:
    """Multiply parameters by 1 - lr * weight_decay, in place."""
    if group["weight_decay"]:
        torch._foreach_mul_(local(parameters), 1 - group["lr"] * group["weight_decay"])


def _cache_sized(parameters: list[Tensor]) -> Iterator[slice]:
    """Slices of parameters with one dtype and device; on a CPU, each fits into the cache."""
    start, numbers = 0, 0
    for index, parameter in enumerate(parameters):
        differs = (parameter.dtype, parameter.device) != (parameters[start].dtype, parameters[start].device)
        is_full = parameter.device.type == "cpu" and numbers + parameter.numel() > CACHE_NUMBERS
        if index > start and (differs or is_full):
            yield slice(start, index)
            start, numbers = index, 0
        numbers += parameter.numel()
    if parameters:
        yield slice(start, len(parameters))
