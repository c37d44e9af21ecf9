"""Addresses and numbers in CPU kernels: pointers, arrays, bf16, bits, and the liberties that the compiler may take."""

# mypy: allow-untyped-defs, allow-incomplete-defs

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

EXACT = {"error_model": "numpy"}
SCALARS = {"fastmath": {"contract", "nsz"}, "error_model": "numpy"}
DOTS = {"fastmath": {"contract", "nsz", "reassoc"}, "error_model": "numpy"}

_WORD, _FLOAT = ir.IntType(32), ir.FloatType()


@intrinsic
def pointer_to(typing_context, kind, address):
    """The address as a pointer to numbers of a kind: a type of NumPy, or what another pointer points to."""
    pointer = types.CPointer(kind.dtype)

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[1], context.get_value_type(pointer))

    return pointer(kind, types.int64), generate


@intrinsic(prefer_literal=True)
def member(typing_context, pairs, index):
    """A null pointer to the kind of numbers that comes first (0) or second (1) in `pairs`, for `pointer_to`."""
    pointer = types.CPointer(pairs.dtype.types[index.literal_value])

    def generate(context, builder, signature, arguments):
        return ir.Constant(context.get_value_type(pointer), None)

    return pointer(pairs, index), generate


@njit
def array(kind, address, shape):
    """The array of a kind of numbers (see `pointer_to`) at an address."""
    return carray(pointer_to(kind, address), shape)


@njit
def floats(address, rows, columns):
    """The (rows, columns) float32 array at an address."""
    return array(np.float32, address, (rows, columns))


@njit
def part_of_rows(num_rows, num_parts, part):
    """First row of a part, and the one after its last."""
    return num_rows * part // num_parts, num_rows * (part + 1) // num_parts


def _bitcast(source, target, result):
    @intrinsic
    def bitcast(typing_context, number):
        def generate(context, builder, signature, arguments):
            return builder.bitcast(arguments[0], result)

        return target(source), generate

    return bitcast


bits_of = _bitcast(types.float32, types.int32, _WORD)  # the bits of a float32 as int32
number_of = _bitcast(types.int32, types.float32, _FLOAT)  # the float32 of these bits


def _words(number):
    """The type of 32-bit integers like a number or vector, and a function for constants of that type."""
    if not isinstance(number.type, ir.VectorType):
        return _WORD, _FLOAT, lambda value: ir.Constant(_WORD, value)
    count = number.type.count
    words = ir.VectorType(_WORD, count)
    return words, ir.VectorType(_FLOAT, count), lambda value: ir.Constant(words, [value] * count)


def from_bf16(builder, bits):
    """The float32 of a bf16's bits, or a vector of them, in a builder's code."""
    words, floats, constant = _words(bits)
    return builder.bitcast(builder.shl(builder.zext(bits, words), constant(16)), floats)


def to_bf16(builder, number):
    """The bits of the bf16 nearest to a float32, ties to even, or a vector of them, in a builder's code."""
    words, _, constant = _words(number)
    bits = builder.bitcast(number, words)
    last = builder.and_(builder.lshr(bits, constant(16)), constant(1))
    rounded = builder.lshr(builder.add(builder.add(bits, constant(0x7FFF)), last), constant(16))
    short = ir.IntType(16)
    return builder.trunc(rounded, ir.VectorType(short, words.count) if words is not _WORD else short)


@intrinsic
def widen(typing_context, number):
    """Float32 of a float32, or of the bits of a bf16."""

    def generate(context, builder, signature, arguments):
        return arguments[0] if number == types.float32 else from_bf16(builder, arguments[0])

    return types.float32(number), generate


@intrinsic
def narrow(typing_context, number, other):
    """A float32 in the type of `other`: itself, or the bits of the nearest bf16, ties to even."""

    def generate(context, builder, signature, arguments):
        return arguments[0] if other == types.float32 else to_bf16(builder, arguments[0])

    return other(types.float32, other), generate
