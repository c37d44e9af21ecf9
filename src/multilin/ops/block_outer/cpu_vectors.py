"""Sixteen products at a time, as vector instructions: compilers find none in loops over 4, 8 or 16 numbers.

A vector holds the products of 16 / J numbers of the left block with the J of the right one, in the order of memory.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from multilin.ops.kernels.cpu_intrinsics import from_bf16, to_bf16

LANES = 16

_FLOAT = ir.FloatType()


def _load(builder, pointer, count):
    """So many numbers, as float32."""
    element = pointer.type.pointee
    vector = builder.bitcast(pointer, ir.VectorType(element, count).as_pointer())
    numbers = builder.load(vector, align=4 if element == _FLOAT else 2)
    return numbers if element == _FLOAT else from_bf16(builder, numbers)


def _store(builder, vector, pointer):
    element = pointer.type.pointee
    numbers = vector if element == _FLOAT else to_bf16(builder, vector)
    place = builder.bitcast(pointer, numbers.type.as_pointer())
    builder.store(numbers, place, align=4 if element == _FLOAT else 2)


def _pick(builder, vector, lanes):
    mask = ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes)
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), mask)


def _sum(builder, vector, groups):
    total = _pick(builder, vector, groups[0])
    for lanes in groups[1:]:
        total = builder.fadd(total, _pick(builder, vector, lanes))
    return total


def _factors(builder, left, right, width):
    """The numbers of the left and of the right block that each lane multiplies."""
    lefts, rights = _load(builder, left, LANES // width), _load(builder, right, width)
    lanes = range(LANES)
    return _pick(builder, lefts, [i // width for i in lanes]), _pick(builder, rights, [i % width for i in lanes])


def make_expand(width):
    """The function expand(left, right, pairs) for right blocks of this width."""

    @intrinsic
    def expand(typing_context, left, right, pairs):
        def generate(context, builder, signature, arguments):
            _store(builder, builder.fmul(*_factors(builder, arguments[0], arguments[1], width)), arguments[2])
            return context.get_dummy_value()

        return types.void(left, right, pairs), generate

    return expand


def make_contract(width):
    """The function contract(dpairs, left, right, dleft, dright) that writes dleft, and adds to dright in float32."""
    count = LANES // width
    by_left = [[k * width + j for k in range(count)] for j in range(width)]
    by_right = [[k * width + j for j in range(width)] for k in range(count)]

    @intrinsic
    def contract(typing_context, dpairs, left, right, dleft, dright):
        def generate(context, builder, signature, arguments):
            p_dpairs, p_left, p_right, p_dleft, p_dright = arguments
            dproducts = _load(builder, p_dpairs, LANES)
            lefts, rights = _factors(builder, p_left, p_right, width)
            _store(builder, _sum(builder, builder.fmul(dproducts, rights), by_left), p_dleft)
            dright = _sum(builder, builder.fmul(dproducts, lefts), by_right)
            _store(builder, builder.fadd(_load(builder, p_dright, width), dright), p_dright)
            return context.get_dummy_value()

        return types.void(dpairs, left, right, dleft, dright), generate

    return contract
