"""Sixteen products at a time, as vector instructions: compilers find none in loops over 4, 8 or 16 numbers.

A vector holds the products of 16 / J numbers of the left block with the J of the right one, in the order of memory.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

LANES = 16

_WORD, _FLOAT = ir.IntType(32), ir.FloatType()


def _load(builder: Any, pointer: Any, count: int) -> Any:
    """So many numbers, as they are."""
    element = pointer.type.pointee
    vector = builder.bitcast(pointer, ir.VectorType(element, count).as_pointer())
    return builder.load(vector, align=_bytes(element))


def _store(builder: Any, vector: Any, pointer: Any) -> None:
    element = pointer.type.pointee
    place = builder.bitcast(pointer, ir.VectorType(element, vector.type.count).as_pointer())
    builder.store(_narrow(builder, vector, element), place, align=_bytes(element))


def _bytes(element: Any) -> int:
    return 4 if element == _FLOAT else 2


def _splat(count: int, number: int) -> Any:
    return ir.Constant(ir.VectorType(_WORD, count), [number] * count)


def _pick(builder: Any, vector: Any, lanes: list[int]) -> Any:
    mask = ir.Constant(ir.VectorType(_WORD, len(lanes)), lanes)
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), mask)


def _widen(builder: Any, vector: Any) -> Any:
    count = vector.type.count
    if vector.type.element == _FLOAT:
        return vector
    bits = builder.zext(vector, ir.VectorType(_WORD, count))
    return builder.bitcast(builder.shl(bits, _splat(count, 16)), ir.VectorType(_FLOAT, count))


def _narrow(builder: Any, vector: Any, element: Any) -> Any:
    """To the nearest bf16, ties to even, or as it is."""
    if element == _FLOAT:
        return vector
    count = vector.type.count
    bits = builder.bitcast(vector, ir.VectorType(_WORD, count))
    last = builder.and_(builder.lshr(bits, _splat(count, 16)), _splat(count, 1))
    rounded = builder.add(builder.add(bits, _splat(count, 0x7FFF)), last)
    return builder.trunc(builder.lshr(rounded, _splat(count, 16)), ir.VectorType(element, count))


def _repeated(builder: Any, pointer: Any, lanes: list[int], count: int) -> Any:
    return _widen(builder, _pick(builder, _load(builder, pointer, count), lanes))


def _lanes(width: int) -> tuple[list[int], list[int]]:
    """Which number of the left and of the right block each lane reads."""
    return [lane // width for lane in range(LANES)], [lane % width for lane in range(LANES)]


def _sum(builder: Any, vector: Any, groups: list[list[int]]) -> Any:
    total = _pick(builder, vector, groups[0])
    for lanes in groups[1:]:
        total = builder.fadd(total, _pick(builder, vector, lanes))
    return total


def make_expand(width: int) -> Any:
    """The function expand(left, right, pairs) for right blocks of this width."""
    lefts, rights = _lanes(width)

    @intrinsic
    def expand(typing_context: Any, left: Any, right: Any, pairs: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            p_left, p_right, p_pairs = arguments
            first = _repeated(builder, p_left, lefts, LANES // width)
            second = _repeated(builder, p_right, rights, width)
            _store(builder, builder.fmul(first, second), p_pairs)
            return context.get_dummy_value()

        return types.void(left, right, pairs), generate

    return expand


def make_contract(width: int) -> Any:
    """The function contract(dpairs, left, right, dleft, dright) that writes dleft, and adds to dright in float32."""
    lefts, rights = _lanes(width)
    count = LANES // width
    by_left = [[k * width + j for k in range(count)] for j in range(width)]
    by_right = [[k * width + j for j in range(width)] for k in range(count)]

    @intrinsic
    def contract(typing_context: Any, dpairs: Any, left: Any, right: Any, dleft: Any, dright: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            p_dpairs, p_left, p_right, p_dleft, p_dright = arguments
            dproducts = _widen(builder, _load(builder, p_dpairs, LANES))
            first = builder.fmul(dproducts, _repeated(builder, p_right, rights, width))
            second = builder.fmul(dproducts, _repeated(builder, p_left, lefts, count))
            _store(builder, _sum(builder, first, by_left), p_dleft)
            total = builder.fadd(_load(builder, p_dright, width), _sum(builder, second, by_right))
            _store(builder, total, p_dright)
            return context.get_dummy_value()

        return types.void(dpairs, left, right, dleft, dright), generate

    return contract
