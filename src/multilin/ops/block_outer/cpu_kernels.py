"""Kernels of `block_outer`: products of pairs in the order of the weight's columns, and their gradients.

Explicit vector instructions compute sixteen products at a time, as compilers do not vectorise loops over 4, 8 or 16
numbers. A vector holds the products of 16 / J numbers of the left block and the J numbers of the right block, in order.
"""

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from multilin.ops.kernels.cpu_intrinsics import (
    SCALARS,
    ZERO,
    arguments_of,
    from_bf16,
    narrow,
    part_of,
    pointer_to,
    to_bf16,
)

LANES = 16

_FLOAT = ir.FloatType()


def _load(builder, pointer, count):
    """Load `count` numbers as float32."""
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


expand_4, expand_8, expand_16 = make_expand(4), make_expand(8), make_expand(16)
contract_4, contract_8, contract_16 = make_contract(4), make_contract(8), make_contract(16)


@njit(forceinline=True, **SCALARS)
def expand_blocks(left, right, pairs):
    """Compute the products of all blocks; left is (blocks, K) and right (blocks, J), all are contiguous."""
    size, K, J = left.itemsize, left.shape[1], right.shape[1]
    lefts, rights, products = left.ctypes.data, right.ctypes.data, pairs.ctypes.data
    for n in range(len(left)):
        p_right = pointer_to(right, rights + size * n * J)
        for k in range(n * K, (n + 1) * K, LANES // J):
            p_left, p_pairs = pointer_to(left, lefts + size * k), pointer_to(pairs, products + size * k * J)
            if J == 4:
                expand_4(p_left, p_right, p_pairs)
            elif J == 8:
                expand_8(p_left, p_right, p_pairs)
            else:
                expand_16(p_left, p_right, p_pairs)


@njit(forceinline=True, **SCALARS)
def contract_blocks(dpairs, left, right, dleft, dright):
    """Compute the gradients of both factors from the gradients of their products; shapes as in `expand_blocks`."""
    size, K, J = left.itemsize, left.shape[1], right.shape[1]
    lefts, rights, dproducts, dlefts = left.ctypes.data, right.ctypes.data, dpairs.ctypes.data, dleft.ctypes.data
    total = np.empty(J, np.float32)
    p_total = pointer_to(np.float32, total.ctypes.data)
    for n in range(len(left)):
        p_right = pointer_to(right, rights + size * n * J)
        total[:] = ZERO
        for k in range(n * K, (n + 1) * K, LANES // J):
            p_left, p_dleft = pointer_to(left, lefts + size * k), pointer_to(dleft, dlefts + size * k)
            p_dpairs = pointer_to(dpairs, dproducts + size * k * J)
            if J == 4:
                contract_4(p_dpairs, p_left, p_right, p_dleft, p_total)
            elif J == 8:
                contract_8(p_dpairs, p_left, p_right, p_dleft, p_total)
            else:
                contract_16(p_dpairs, p_left, p_right, p_dleft, p_total)
        for j in range(J):
            dright[n, j] = narrow(total[j], dright[n, j])


def expand(task, elements, index, sources):
    """Compute the products for one part of the rows; left is (rows * blocks, K), right (rows * blocks, J)."""
    num_parts, left, right, pairs = arguments_of(task)
    N, (first, last) = len(left) // len(pairs), part_of(len(pairs), num_parts, index)
    expand_blocks(left[first * N : last * N], right[first * N : last * N], pairs[first:last])


def contract(task, elements, index, sources):
    """Compute the gradients of both factors for one part of the rows."""
    num_parts, dpairs, left, right, dleft, dright = arguments_of(task)
    N, (first, last) = len(left) // len(dpairs), part_of(len(dpairs), num_parts, index)
    blocks = slice(first * N, last * N)
    contract_blocks(dpairs[first:last], left[blocks], right[blocks], dleft[blocks], dright[blocks])
