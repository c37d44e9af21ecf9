"""Matrices of layers, and the arithmetic of their products: floats or int8."""

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from multilin.errors import InputError
from multilin.ops.block_outer import block_outer
from multilin.ops.int8 import Rounded, dequantize, int8_block_outer, int8_linear, round_weight, simulate_rounding
from multilin.ops.kernels import is_exported
from multilin.settings import settings


@settings
class Arithmetic:
    """How layers multiply with their matrices; embedding and output always use floats."""

    products: Literal["float", "int8"] = "float"  # format of products of inputs and weights
    backward: Literal["float", "int8"] = "float"  # format of products in the backward pass, if `products` is int8
    weights: Literal["none", "sim_4bit", "sim_2bit", "ternary"] = (
        "none"  # round float weights to the levels of these formats
    )
    stored_as_int8: bool = False  # keep weights in int8 only, without float weights


class Linear(nn.Linear):
    """PyTorch's Linear, which can also compute in int8 or with rounded weights; see `set_arithmetic`.

    `hold_int8` replaces the weight by int8 values and a scale, `weight_int8` and `weight_scale`: buffers, which are
    saved with the model and cannot be trained. `follow_int8` keeps the parameter beside int8 values, for gradients.

    Args:
        in_features, out_features, bias: as for PyTorch's Linear.
        starts_at_zero: whether the model initialises the weights with zeros.
    """

    arithmetic = Arithmetic()
    weight_int8: Tensor
    weight_scale: Tensor

    def __init__(self, in_features: int, out_features: int, bias: bool = True, *, starts_at_zero: bool = False) -> None:
        super().__init__(in_features, out_features, bias)
        self.starts_at_zero = starts_at_zero

    def forward(self, input: Tensor) -> Tensor:
        """(..., n) to (..., m)."""
        return self.multiply(input)

    def matrix(self) -> Tensor | Rounded:
        """The parameter, or the int8 values that replace it."""
        if not self.arithmetic.stored_as_int8:
            return self.weight
        return Rounded(self.weight_int8, self.weight_scale)

    def multiply(self, x: Tensor, factor: float = 1.0) -> Tensor:
        """Return factor * W x + bias, (..., m), for x of shape (..., n)."""
        if self.arithmetic.products == "int8":
            return int8_linear(x, self.matrix(), self.bias, factor=factor, **self._rounding())
        weight = self.float_matrix(x.dtype)
        if is_exported() and factor != 1.0:  # the scaled matrix is a constant of the graph
            weight, factor = weight * factor, 1.0
        if factor == 1.0:
            return nn.functional.linear(x, weight, self.bias)
        # As an argument of the product, the factor costs no time.
        start, beta = (weight.new_zeros(()), 0.0) if self.bias is None else (self.bias, 1.0)
        result = torch.addmm(start, x.reshape(-1, x.shape[-1]), weight.t(), beta=beta, alpha=factor)
        return result.view(*x.shape[:-1], len(weight))

    def multiply_pairs(self, left: Tensor, right: Tensor, factor: float = 1.0) -> Tensor:
        """Return factor * W p + bias, (..., m), for the block outer product p of (..., N, K) and (..., N, J)."""
        shape = (-1, *left.shape[-2:], right.shape[-1])
        if self.arithmetic.products == "int8":
            rounding = self._rounding()
            if rounding["parameter"] is not None:
                rounding["parameter"] = rounding["parameter"].view(shape)
            weight = self.matrix()
            if isinstance(weight, Rounded):
                weight = weight._replace(values=weight.values.view(shape))
            else:
                weight = weight.view(shape)
            result = int8_block_outer(left, right, weight, factor=factor, **rounding)
        else:
            weight = self.float_matrix(left.dtype).view(shape)
            if is_exported() and factor != 1.0:
                weight, factor = weight * factor, 1.0
            result = block_outer(left, right, weight)
            result = result if factor == 1.0 else result * factor
        return result if self.bias is None else result + self.bias

    def _rounding(self) -> dict[str, Any]:
        return {
            "levels": self.levels, "backward": self.arithmetic.backward, "parameter": getattr(self, "weight", None)
        }  # fmt: skip

    @property
    def levels(self) -> str:
        """The name of the levels to which `round_weight` rounds the weight for int8 products."""
        return "int8" if self.arithmetic.weights == "none" else self.arithmetic.weights

    def float_matrix(self, dtype: torch.dtype | None = None) -> Tensor:
        """The matrix as floats: int8 weights are converted to `dtype`, a parameter keeps its dtype."""
        weight = self.matrix()
        if isinstance(weight, Rounded):
            return dequantize(weight).to(dtype or weight.scale.dtype)
        return weight if self.arithmetic.weights == "none" else simulate_rounding(weight, self.arithmetic.weights)

    def hold_int8(self) -> None:
        """Keep int8 values and a scale instead of the weight."""
        rounded = round_weight(self.weight, self.levels)
        del self.weight
        self._register(rounded)

    def follow_int8(self, rounded: Rounded) -> None:
        """Multiply with these int8 values; the floats are kept on another device.

        The parameter still gets the gradient of the floats, but the parameter's numbers are no longer read.
        """
        self.arithmetic = dataclasses.replace(self.arithmetic, stored_as_int8=True)
        self._register(rounded)

    def _register(self, rounded: Rounded) -> None:
        self.register_buffer("weight_int8", rounded.values)
        self.register_buffer("weight_scale", rounded.scale)


def is_unwrapped(module: nn.Module) -> bool:
    """True if a call of the module only runs the `forward` of its class.

    False if there are hooks, or if `forward` was replaced, as accelerate does to fetch weights from another device. The
    caller must check the class too, because an adapter around a module has another class.
    """
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return "forward" not in vars(module) and not any(hooks)


def weight_of(module: nn.Module, like: Tensor) -> Tensor:
    """The matrix (m, n) of a Linear without bias; for an adapter around a Linear, the combined matrix of both.

    Args:
        module: PyTorch's Linear, or an adapter around it.
        like: a tensor with the device and dtype to compute in.
    """
    if type(module) is nn.Linear and is_unwrapped(module):
        return module.weight
    return module(torch.eye(module.in_features).to(like)).T  # type: ignore[call-overload]


def multiply_scaled(module: nn.Module, x: Tensor) -> Tensor:
    """Compute W x / sqrt(width of x), which keeps the variance of x if the weights have unit variance.

    Args:
        module: a Linear; or an adapter around a Linear, which is then called.
        x: (..., n).

    Returns:
        (..., m).
    """
    factor = x.shape[-1] ** -0.5
    if isinstance(module, Linear) and is_unwrapped(module):
        return module.multiply(x, factor)
    return module(x * factor)


def multiply_pairs(module: nn.Module, left: Tensor, right: Tensor, *, scaled: bool = False) -> Tensor:
    """Compute W p, where p holds the products of all pairs in each block, p[n, k, j] = left[n, k] right[n, j].

    Args:
        module: a Linear with N K J inputs; or an adapter around a Linear, which is then called with p.
        left: (..., N, K).
        right: (..., N, J).
        scaled: divide by sqrt(N K J).

    Returns:
        (..., m).
    """
    factor = (left.shape[-2] * left.shape[-1] * right.shape[-1]) ** -0.5 if scaled else 1.0
    if isinstance(module, Linear) and is_unwrapped(module):
        return module.multiply_pairs(left, right, factor)
    return module((left[..., None] * right[..., None, :] * factor).flatten(-3))


def matrix_modules(layers: nn.Module) -> Iterator[Linear]:
    """Every Linear in the layers."""
    return (module for module in layers.modules() if isinstance(module, Linear))


def set_arithmetic(layers: nn.Module, arithmetic: Arithmetic) -> None:
    """Set the arithmetic of every Linear in the layers; int8 weights cannot go back to floats.

    Raises:
        InputError: the weights are int8 and the arithmetic needs floats.
    """
    for module in matrix_modules(layers):
        if module.arithmetic.stored_as_int8 and not arithmetic.stored_as_int8:
            raise InputError("stored_as_int8: False given, but this model has only int8 weights, without floats")
        if arithmetic.stored_as_int8 and not module.arithmetic.stored_as_int8:
            module.arithmetic = arithmetic
            module.hold_int8()
        module.arithmetic = arithmetic
