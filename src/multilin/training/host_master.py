"""Keeps float weights and the optimizer in host memory, and int8 copies of the matrices on the training device."""

import copy
import functools
import warnings

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from multilin.errors import InputError
from multilin.layers.linear import Linear, matrix_modules
from multilin.ops.int8 import Rounded, dequantize_blocks, quantize_blocks, round_weight
from multilin.training.processes import world_size
from multilin.training.settings import TrainingRecipe


class HostMaster:
    """A model in host memory, which an optimizer changes, and its copy on a device, which computes gradients.

    For every matrix of the layers the device holds int8 values and one scale. All other parameters (embedding, output,
    norms, biases) are floats on host and device. Each complete gradient is sent to the host, which adds up gradients:
    matrices in int8 blocks of 128 with one scale each, vectors as floats. So the device holds one gradient at a time.

    Attributes:
        model: the float model in host memory.
        copy: the model on the device, with the same parameter names; its matrix parameters have a shape but no data.
    """

    def __init__(self, model: PreTrainedModel, device: torch.device | str) -> None:
        """Create the copy on the device; `model` must compute int8 products."""
        self.model, self.device = model, torch.device(device)
        in_int8 = {id(module.weight) for module in matrix_modules(model)}
        self.copy = self._copy_without(in_int8)
        self._matrices = list(zip(matrix_modules(model), matrix_modules(self.copy), strict=True))
        both = list(zip(model.parameters(), self.copy.parameters(), strict=True))
        self._floats = [(parameter, copied) for parameter, copied in both if id(parameter) not in in_int8]
        for parameter, copied in both:
            if copied.requires_grad:
                copied.register_post_accumulate_grad_hook(functools.partial(self._bring_gradient, parameter))
        for module, copied_module in self._matrices:
            copied_module.follow_int8(self._send_matrix(module))

    def to_device(self, tensor: Tensor) -> Tensor:
        """The tensor on the device."""
        return tensor.to(self.device)

    def to_host(self, tensor: Tensor) -> Tensor:
        """The tensor in host memory."""
        return tensor.cpu()

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Clear the gradients and update the copy, after each step of an optimizer of `model`."""

        def renew(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
            optimizer.zero_grad(set_to_none=True)
            self.send()

        optimizer.register_step_post_hook(renew)

    @torch.no_grad()
    def send(self) -> None:
        """Copy the current weights to the device."""
        for module, copied_module in self._matrices:
            rounded, held = self._send_matrix(module), copied_module.matrix()
            assert isinstance(held, Rounded)
            held.values.copy_(rounded.values)
            held.scale.copy_(rounded.scale)
        for parameter, copied in self._floats:
            copied.copy_(self.to_device(parameter))

    def _send_matrix(self, module: Linear) -> Rounded:
        return Rounded(*map(self.to_device, round_weight(module.weight, module.levels)))

    def _copy_without(self, matrices: set[int]) -> PreTrainedModel:
        made: dict[int, object] = {id(self.model.config): self.model.config}
        made |= {id(buffer): self.to_device(buffer).clone() for buffer in self.model.buffers()}
        for parameter in self.model.parameters():
            if id(parameter) in matrices:
                numbers = torch.zeros((), dtype=parameter.dtype, device=self.device).expand(parameter.shape)
            else:
                numbers = self.to_device(parameter.detach()).clone()
            made[id(parameter)] = nn.Parameter(numbers, requires_grad=parameter.requires_grad)
        # deepcopy treats these objects as copied already; both models share the config.
        return copy.deepcopy(self.model, made)

    def _bring_gradient(self, parameter: Tensor, copied: Tensor) -> None:
        gradient, copied.grad = copied.grad, None
        assert gradient is not None
        if gradient.ndim > 1:
            parts = Rounded(*map(self.to_host, quantize_blocks(gradient)))
            brought = dequantize_blocks(parts, gradient.shape).to(parameter.dtype)
        else:
            brought = self.to_host(gradient)
        parameter.grad = brought if parameter.grad is None else parameter.grad.add_(brought)


def check_host_master(plan: TrainingRecipe, device: torch.device) -> None:
    """Raise if these settings, or this machine, do not allow float weights to stay in host memory.

    Raises:
        InputError: the layers' matrices are not int8, or there is more than one device.
    """
    if plan.precision != "int8":
        raise InputError(
            f"training.master: 'host' given with training.precision {plan.precision!r}, but it works only with the "
            "precision int8"
        )
    if (count := max(world_size(), torch.accelerator.device_count())) > 1:
        raise InputError(f"training.master: 'host' given on {count} devices, but it needs one process with one device")
    if device.type == "cpu":
        warnings.warn(
            "training.master: 'host' saves memory of a GPU, but this machine has no GPU: 'host' only costs time and "
            "rounds the gradients",
            stacklevel=3,
        )
