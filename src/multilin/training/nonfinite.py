"""Finds the module that first computes a number that is not finite, by repeating a pass and watching modules."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


def find_nonfinite(model: nn.Module, loss_of: Callable[[], Tensor]) -> str | None:
    """Describe the first place in a forward and backward pass where a number is not finite.

    The model's gradients are left as they are. The result is None if all numbers are finite, or if the pass fails, as
    may happen because watching takes more memory than training.

    Args:
        model: computes the loss; not compiled, and not divided among devices.
        loss_of: runs the forward pass and returns the loss.
    """
    for name, parameter in model.named_parameters():
        if not _is_finite(parameter):
            return f"{name} was not finite before the step"
    watch = _Watch(model)
    try:
        with contextlib.suppress(RuntimeError), torch.enable_grad(), torch.compiler.set_stance("force_eager"):
            loss = loss_of()
            if watch.found is None and not _is_finite(loss):
                watch.note("", "forward")
            if watch.found is None:
                trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
                torch.autograd.grad(loss, trained, allow_unused=True)
    finally:
        watch.remove()
    return watch.found


# Attribute of a tensor: names of the modules that received it; the last one computes its gradient.
_RECEIVERS = "_multilin_receivers"
_LISTS = nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict  # containers, which compute nothing


class _Watch:
    """Records the first module that computes a number that is not finite, in the forward or the backward pass.

    A computation between two modules is attributed to the module that contains both. The gradients of a module's inputs
    and parameters are attributed to this module, and the gradient of its output to the module that contains it.
    """

    def __init__(self, model: nn.Module) -> None:
        self.found: str | None = None
        self._handles: list[Any] = []
        self._lists = {name for name, module in model.named_modules() if isinstance(module, _LISTS)}
        for name, module in model.named_modules():
            self._handles += [
                module.register_forward_pre_hook(functools.partial(self._enter, name), with_kwargs=True),
                module.register_forward_hook(functools.partial(self._leave, name)),
            ]
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self._handles.append(self._look_at_gradient(parameter, [self._parent(name)]))

    def remove(self) -> None:
        """End watching."""
        for handle in self._handles:
            handle.remove()

    def note(self, name: str, direction: str) -> None:
        """Record that the named module computes numbers that are not finite, unless a module is recorded already."""
        if self.found is None:
            self.found = f"first in the {direction} pass of {name or 'the loss'}"

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if not all(map(_is_finite, _tensors([args, kwargs]))):
            self.note(self._parent(name), "forward")
        return tuple(map(self._own, [name] * len(args), args)), {k: self._own(name, v) for k, v in kwargs.items()}

    def _own(self, name: str, value: Any) -> Any:
        """The value; if it has a gradient, a watched copy, whose gradient comes from the named module alone."""
        if not (isinstance(value, Tensor) and value.requires_grad and value.is_floating_point()):
            return value
        copied = value.clone()
        self._follow(copied, name)
        return copied

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        for tensor in _tensors(output):
            if not _is_finite(tensor):
                self.note(name, "forward")
            elif tensor.requires_grad:
                self._follow(tensor, self._parent(name))

    def _parent(self, name: str) -> str:
        """The name of the module that contains, and calls, the module or parameter `name`."""
        parent = name.rpartition(".")[0]
        return self._parent(parent) if parent in self._lists else parent

    def _follow(self, tensor: Tensor, name: str) -> None:
        """Watch the gradient of a tensor; the module `name`, the last to receive the tensor, computes the gradient."""
        if not hasattr(tensor, _RECEIVERS):
            setattr(tensor, _RECEIVERS, receivers := list[str]())
            self._look_at_gradient(tensor, receivers)
        getattr(tensor, _RECEIVERS).append(name)

    def _look_at_gradient(self, tensor: Tensor, names: list[str]) -> Any:
        """If the tensor's gradient is not finite, record the module that computed it: the last of `names`."""

        def look(gradient: Tensor) -> None:
            if not _is_finite(gradient):
                self.note(names[-1], "backward")

        return tensor.register_hook(look)  # type: ignore[no-untyped-call]


def _tensors(value: Any) -> Iterator[Tensor]:
    """The float tensors in the inputs or outputs of a module."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, list | tuple | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)


def _is_finite(tensor: Tensor) -> bool:
    return bool(tensor.isfinite().all())
