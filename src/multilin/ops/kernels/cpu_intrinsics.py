"""Tools of CPU kernels: arrays at addresses, bf16, the exponential, and how freely the compiler may reorder sums."""

import functools
import itertools

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic, models, register_model
from numba.np.arrayobj import populate_array

EXACT = {"error_model": "numpy"}
SCALARS = {"fastmath": {"contract", "nsz"}, "error_model": "numpy"}
DOTS = {"fastmath": {"contract", "nsz", "reassoc"}, "error_model": "numpy"}

ZERO, ONE, NOTHING = np.float32(0), np.float32(1), np.float32(-np.inf)
LOWEST, TINY = np.float32(np.finfo(np.float32).min), 1e-300
_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_C2, _C3, _C4 = np.float32(0.5), np.float32(1.6666665459e-1), np.float32(4.1665795894e-2)
_C5, _C6, _C7 = np.float32(8.3334519073e-3), np.float32(1.3981999507e-3), np.float32(1.9875691500e-4)
_SMALLEST = np.float32(-87.0)
_BIAS, _MANTISSA_BITS = np.int32(127), np.int32(23)
_SHORT, _WORD, _LONG, _FLOAT = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()


@intrinsic
def pointer_to(typing_context, kind, address):
    """Cast an address to a pointer to numbers of a kind: a NumPy type, or an array or pointer with such elements."""
    pointer = types.CPointer(kind.dtype)

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[1], context.get_value_type(pointer))

    return pointer(kind, types.int64), generate


class TaskType(types.Opaque):
    """The address of a kernel's arguments of types `kinds`; a number is a 64-bit word, an array address and sizes."""

    def __init__(self, kinds, sources):
        super().__init__(f"task{kinds} {sources}")
        self.kinds = kinds


register_model(TaskType)(models.OpaqueModel)


@intrinsic
def arguments_of(typing_context, task):
    """The arguments of a kernel: numbers, and arrays of one or two axes."""
    result = types.Tuple(task.kinds)

    def generate(context, builder, signature, arguments):
        pointer, values = builder.bitcast(arguments[0], _LONG.as_pointer()), []
        words = (builder.load(builder.gep(pointer, [ir.Constant(_WORD, i)])) for i in itertools.count())
        for kind in task.kinds:
            if not isinstance(kind, types.Array):
                values.append(builder.bitcast(next(words), context.get_value_type(kind)))
                continue
            size = context.get_abi_sizeof(context.get_data_type(kind.dtype))
            made = context.make_array(kind)(context, builder)
            data, shape = builder.inttoptr(next(words), made.data.type), [next(words) for _ in range(kind.ndim)]
            strides = [ir.Constant(_LONG, size)]
            if kind.ndim == 2:
                strides.insert(0, builder.mul(shape[1], strides[0]))
            populate_array(made, data, shape, strides, ir.Constant(_LONG, size), None)
            values.append(made._getvalue())
        return context.make_tuple(builder, result, values)

    return result(task), generate


@njit
def array(kind, address, shape):
    """The array of a kind of numbers (see `pointer_to`) at an address."""
    return carray(pointer_to(kind, address), shape)


@njit
def floats(address, rows, columns):
    """The (rows, columns) float32 array at an address."""
    return array(np.float32, address, (rows, columns))


@njit
def doubles(address, length):
    """The (length,) float64 array at an address."""
    return array(np.float64, address, (length,))


@njit
def part_of(num_rows, num_parts, part):
    """First row of a part, and the row after its last row."""
    return num_rows * part // num_parts, num_rows * (part + 1) // num_parts


def _types_like(number):
    """For this number or vector: the types of 16-bit words, 32-bit words and floats, and a maker of constants."""
    if not isinstance(number.type, ir.VectorType):
        return _SHORT, _WORD, _FLOAT, functools.partial(ir.Constant, _WORD)
    count = number.type.count
    short, word, floats = (ir.VectorType(element, count) for element in (_SHORT, _WORD, _FLOAT))
    return short, word, floats, lambda value: ir.Constant(word, [value] * count)


def from_bf16(builder, bits):
    """Add code that turns the bits of bf16 into float32, for one number or a vector."""
    _, word, floats, constant = _types_like(bits)
    return builder.bitcast(builder.shl(builder.zext(bits, word), constant(16)), floats)


def to_bf16(builder, number):
    """Add code that rounds float32 to the bits of the nearest bf16, ties to even, for one number or a vector."""
    short, word, _, constant = _types_like(number)
    bits = builder.bitcast(number, word)
    last = builder.and_(builder.lshr(bits, constant(16)), constant(1))
    return builder.trunc(builder.lshr(builder.add(builder.add(bits, constant(0x7FFF)), last), constant(16)), short)


@intrinsic
def widen(typing_context, number):
    """Convert the bits of a bf16 to float32; a float32 stays as it is."""

    def generate(context, builder, signature, arguments):
        return arguments[0] if number == types.float32 else from_bf16(builder, arguments[0])

    return types.float32(number), generate


@intrinsic
def narrow(typing_context, number, other):
    """Convert a float32 to the type of `other`: to float32, or to the bits of the nearest bf16, ties to even."""

    def generate(context, builder, signature, arguments):
        return arguments[0] if other == types.float32 else to_bf16(builder, arguments[0])

    return other(types.float32, other), generate


@njit(**DOTS)
def sum_of(x):
    """Sum of the numbers."""
    total = ZERO
    for i in range(x.size):
        total += x[i]
    return total


@njit(**SCALARS)
def exp_negative(x):
    """e^x in float32 for x <= 0, 0 below -87; Cephes' expf polynomial, which compilers can vectorise."""
    bounded = _SMALLEST if x < _SMALLEST else x
    n = np.rint(bounded * _LOG2_E)
    r = bounded - n * _LN2_HIGH
    r = r - n * _LN2_LOW
    p = _C7 * r + _C6
    p = p * r + _C5
    p = p * r + _C4
    p = p * r + _C3
    p = p * r + _C2
    p = p * r * r + r + ONE
    result = p * np.int32((np.int32(n) + _BIAS) << _MANTISSA_BITS).view(np.float32)
    return ZERO if x <= _SMALLEST else result
