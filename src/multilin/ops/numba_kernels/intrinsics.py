"""Addresses and numbers in kernels: pointers of a type, bf16, and the liberties that the compiler may take."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

SCALARS = {"fastmath": {"contract", "nsz"}, "error_model": "numpy"}
DOTS = {"fastmath": {"contract", "nsz", "reassoc"}, "error_model": "numpy"}


@intrinsic
def like(typing_context: Any, pointer: Any, address: Any) -> Any:
    """The address as a pointer to what `pointer` points to."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[1], context.get_value_type(pointer))

    return pointer(pointer, types.int64), generate


@intrinsic
def like_first(typing_context: Any, pairs: Any, address: Any) -> Any:
    """The address as a pointer to what the first of the pairs is, that `pairs` points to."""
    return _pointer_to_member(pairs, 0)


@intrinsic
def like_second(typing_context: Any, pairs: Any, address: Any) -> Any:
    """The address as a pointer to what the second of the pairs is, that `pairs` points to."""
    return _pointer_to_member(pairs, 1)


def _pointer_to_member(pairs: Any, member: int) -> Any:
    pointer = types.CPointer(pairs.dtype.types[member])

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[1], context.get_value_type(pointer))

    return pointer(pairs, types.int64), generate


@intrinsic
def to_float32_pointer(typing_context: Any, address: Any) -> Any:
    """The address as a pointer to float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.FloatType().as_pointer())

    return types.CPointer(types.float32)(types.int64), generate


@intrinsic
def to_int64_pointer(typing_context: Any, address: Any) -> Any:
    """The address as a pointer to int64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())

    return types.CPointer(types.int64)(types.int64), generate


@intrinsic
def bits_of(typing_context: Any, number: Any) -> Any:
    """The bits of a float32 as int32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.int32(types.float32), generate


@intrinsic
def number_of(typing_context: Any, bits: Any) -> Any:
    """The float32 of these bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


def from_bf16(builder: Any, bits: Any) -> Any:
    """The float32 of a bf16's bits, in a builder's code."""
    word = ir.IntType(32)
    return builder.bitcast(builder.shl(builder.zext(bits, word), ir.Constant(word, 16)), ir.FloatType())


def to_bf16(builder: Any, number: Any) -> Any:
    """The bits of the bf16 nearest to a float32, ties to even, in a builder's code."""
    word = ir.IntType(32)
    bits = builder.bitcast(number, word)
    last = builder.and_(builder.lshr(bits, ir.Constant(word, 16)), ir.Constant(word, 1))
    rounded = builder.add(builder.add(bits, ir.Constant(word, 0x7FFF)), last)
    return builder.trunc(builder.lshr(rounded, ir.Constant(word, 16)), ir.IntType(16))


@intrinsic
def widen(typing_context: Any, number: Any) -> Any:
    """Float32 of a float32, or of the bits of a bf16."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return arguments[0] if number == types.float32 else from_bf16(builder, arguments[0])

    return types.float32(number), generate


@intrinsic
def narrow(typing_context: Any, number: Any, other: Any) -> Any:
    """A float32 in the type of `other`: itself, or the bits of the nearest bf16, ties to even."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return arguments[0] if other == types.float32 else to_bf16(builder, arguments[0])

    return other(types.float32, other), generate
