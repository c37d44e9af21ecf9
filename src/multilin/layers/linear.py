"""Matrices of layers, and the arithmetic that multiplies with them: floats, or int8."""

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from multilin.errors import InputError
from multilin.layers.base import ParameterHolder
from multilin.ops.block_outer import block_outer
from multilin.ops.int8 import Rounded, dequantize, int8_block_outer, int8_linear, round_weight, simulate_rounding
from multilin.settings import settings


@settings
class Arithmetic:
    """How layers multiply with their matrices; embedding and output always use floats."""

    products: Literal["float", "int8"] = "float"  # products of inputs and weights
    backward: Literal["float", "int8"] = "float"  # products of gradients, where the others are int8
    weights: Literal["none", "sim_4bit", "sim_2bit", "ternary"] = (
        "none"  # round float weights to as few values as these formats have
    )
    stored_as_int8: bool = False  # keep weights in int8 only, without their floats


class MatrixModule(nn.Module):
    """A module that multiplies with matrices, in the arithmetic that is set; subclasses name them in `matrices`.

    `hold_int8` replaces them by int8 values and a scale, `NAME_int8` and `NAME_scale`: buffers, which are saved with
    the model and cannot be trained. `follow_int8` sets them beside the parameters, where gradients still arrive.
    """

    matrices: tuple[str, ...] = ("weight",)
    arithmetic = Arithmetic()

    def matrix(self, name: str) -> Tensor | Rounded:
        """The parameter, or the int8 values that replaced it."""
        if not self.arithmetic.stored_as_int8:
            parameter: Tensor = getattr(self, name)
            return parameter
        return Rounded(getattr(self, f"{name}_int8"), getattr(self, f"{name}_scale"))

    def multiply(self, x: Tensor, bias: Tensor | None = None, *, name: str = "weight", factor: float = 1.0) -> Tensor:
        """factor * W x + bias; (..., n) to (..., m)."""
        if self.arithmetic.products == "int8":
            return int8_linear(x, self.matrix(name), bias, factor=factor, **self._rounding(name))
        weight = self.float_matrix(name, x.dtype)
        if torch.compiler.is_exporting() and factor != 1.0:  # a graph has a constant matrix, which can be rounded
            weight, factor = weight * factor, 1.0
        if factor == 1.0:
            return nn.functional.linear(x, weight, bias)
        # The factor inside the product takes no time.
        start, beta = (weight.new_zeros(()), 0.0) if bias is None else (bias, 1.0)
        result = torch.addmm(start, x.reshape(-1, x.shape[-1]), weight.t(), beta=beta, alpha=factor)
        return result.view(*x.shape[:-1], len(weight))

    def combine_pairs(self, left: Tensor, right: Tensor, *, name: str, factor: float = 1.0) -> Tensor:
        """factor times the block outer product of (..., N, K) and (..., N, J), contracted."""
        if self.arithmetic.products == "int8":
            return int8_block_outer(left, right, self.matrix(name), factor=factor, **self._rounding(name))
        weight = self.float_matrix(name, left.dtype)
        if torch.compiler.is_exporting() and factor != 1.0:
            weight, factor = weight * factor, 1.0
        result = block_outer(left, right, weight)
        return result if factor == 1.0 else result * factor

    def _rounding(self, name: str) -> dict[str, Any]:
        return {
            "levels": self._levels, "backward": self.arithmetic.backward, "parameter": getattr(self, name, None)
        }  # fmt: skip

    @property
    def _levels(self) -> str:
        return "int8" if self.arithmetic.weights == "none" else self.arithmetic.weights

    def float_matrix(self, name: str = "weight", dtype: torch.dtype | None = None) -> Tensor:
        """The matrix that products see, as floats: int8 weights in this dtype, a parameter in its own."""
        weight = self.matrix(name)
        if isinstance(weight, Rounded):
            return dequantize(weight).to(dtype or weight.scale.dtype)
        return weight if self.arithmetic.weights == "none" else simulate_rounding(weight, self.arithmetic.weights)

    def hold_int8(self) -> None:
        """Keep int8 values and a scale instead of every matrix."""
        for name in self.matrices:
            rounded = round_weight(getattr(self, name), self._levels)
            delattr(self, name)
            self._register(name, rounded)

    def follow_int8(self, name: str, rounded: Rounded) -> None:
        """Multiply with int8 values whose floats are kept elsewhere.

        The gradient of the floats still arrives at the parameter, whose own numbers are no longer read.
        """
        self.arithmetic = dataclasses.replace(self.arithmetic, stored_as_int8=True)
        self._register(name, rounded)

    def _register(self, name: str, rounded: Rounded) -> None:
        self.register_buffer(f"{name}_int8", rounded.values)
        self.register_buffer(f"{name}_scale", rounded.scale)


class Linear(nn.Linear, MatrixModule):
    """PyTorch's Linear, in the arithmetic that is set."""

    def forward(self, input: Tensor) -> Tensor:
        """(..., n) to (..., m)."""
        return self.multiply(input, self.bias)


class ScaledLinear(ParameterHolder, MatrixModule):
    """W x / sqrt(width of x), without bias: with weights of unit variance y has the variance of x."""

    def __init__(self, in_size: int, out_size: int, *, starts_at_zero: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_size, in_size))
        self.in_size, self.starts_at_zero = in_size, starts_at_zero

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) to (..., out)."""
        return self.multiply(x, factor=self.in_size**-0.5)

    def initialize(self, std: float) -> None:
        """Normal weights, or zeros."""
        nn.init.normal_(self.weight, std=0.0 if self.starts_at_zero else std)


def matrix_modules(layers: nn.Module) -> Iterator[MatrixModule]:
    """Every MatrixModule in the layers."""
    return (module for module in layers.modules() if isinstance(module, MatrixModule))


def set_arithmetic(layers: nn.Module, arithmetic: Arithmetic) -> None:
    """Set the arithmetic of every MatrixModule in the layers; int8 weights cannot go back to floats.

    Raises:
        InputError: the weights are int8 and the arithmetic needs floats.
    """
    for module in matrix_modules(layers):
        if module.arithmetic.stored_as_int8 and not arithmetic.stored_as_int8:
            raise InputError("stored_as_int8: False given, but this model's weights are int8 and their floats are gone")
        if arithmetic.stored_as_int8 and not module.arithmetic.stored_as_int8:
            module.arithmetic = arithmetic
            module.hold_int8()
        module.arithmetic = arithmetic
