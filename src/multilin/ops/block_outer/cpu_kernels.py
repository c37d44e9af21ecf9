"""Kernels of `block_outer`: products of pairs in the order in which they multiply the weight, and back."""

from typing import Any

import numpy as np
from numba import carray, njit

from multilin.ops.block_outer.cpu_vectors import LANES, make_contract, make_expand
from multilin.ops.numba_kernels.intrinsics import SCALARS, like, narrow, to_float32_pointer, widen
from multilin.ops.numba_kernels.parts import part_of_rows

ZERO = np.float32(0)
expand_4, expand_8, expand_16 = make_expand(4), make_expand(8), make_expand(16)
contract_4, contract_8, contract_16 = make_contract(4), make_contract(8), make_contract(16)


@njit
def lefts_of_a_vector(left_width: int, right_width: int) -> int:
    """Numbers of the left block in a vector, 0 where blocks are not made of whole vectors."""
    if right_width != 4 and right_width != 8 and right_width != 16:
        return 0
    count = LANES // right_width
    return count if left_width % count == 0 else 0


@njit(forceinline=True, **SCALARS)
def expand_block(elements: Any, left: int, right: int, pairs: int, K: int, J: int, size: int, step: int) -> None:
    """One block at these addresses, of numbers of so many bytes."""
    if step != 0:
        k = 0
        while k < K:
            p_left, p_pairs = like(elements, left + size * k), like(elements, pairs + size * k * J)
            if J == 4:
                expand_4(p_left, like(elements, right), p_pairs)
            elif J == 8:
                expand_8(p_left, like(elements, right), p_pairs)
            else:
                expand_16(p_left, like(elements, right), p_pairs)
            k += step
        return
    lefts, rights = carray(like(elements, left), (K,)), carray(like(elements, right), (J,))
    products = carray(like(elements, pairs), (K, J))
    for k in range(K):
        number = widen(lefts[k])
        for j in range(J):
            products[k, j] = narrow(number * widen(rights[j]), products[k, j])


@njit(forceinline=True, **SCALARS)
def contract_block(
    elements: Any, left: int, right: int, dpairs: int, dleft: int, total: int, K: int, J: int, size: int, step: int
) -> None:
    """dleft of one block, and dright as `total` in float32, which is 0 before."""
    if step != 0:
        k = 0
        while k < K:
            p_left, p_dpairs = like(elements, left + size * k), like(elements, dpairs + size * k * J)
            p_dleft, p_total = like(elements, dleft + size * k), to_float32_pointer(total)
            if J == 4:
                contract_4(p_dpairs, p_left, like(elements, right), p_dleft, p_total)
            elif J == 8:
                contract_8(p_dpairs, p_left, like(elements, right), p_dleft, p_total)
            else:
                contract_16(p_dpairs, p_left, like(elements, right), p_dleft, p_total)
            k += step
        return
    lefts, rights = carray(like(elements, left), (K,)), carray(like(elements, right), (J,))
    dproducts, dlefts = carray(like(elements, dpairs), (K, J)), carray(like(elements, dleft), (K,))
    totals = carray(to_float32_pointer(total), (J,))
    for k in range(K):
        number, dnumber = widen(lefts[k]), ZERO
        for j in range(J):
            dproduct = widen(dproducts[k, j])
            dnumber += dproduct * widen(rights[j])
            totals[j] += dproduct * number
        dlefts[k] = narrow(dnumber, dlefts[k])


def expand(tasks: Any, elements: Any, index: int, sources: Any) -> None:
    """Pairs of one part of the rows."""
    task = carray(tasks, (1,))[0]
    K, J, size = task.left_width, task.right_width, carray(elements, (1,)).itemsize
    step = lefts_of_a_vector(K, J)
    first, last = part_of_rows(task.num_rows, task.num_parts, index)
    for n in range(first * task.num_blocks, last * task.num_blocks):
        left, right, pairs = task.left + size * n * K, task.right + size * n * J, task.pairs + size * n * K * J
        expand_block(elements, left, right, pairs, K, J, size, step)


def contract(tasks: Any, elements: Any, index: int, sources: Any) -> None:
    """Gradients of both factors in one part of the rows."""
    task = carray(tasks, (1,))[0]
    K, J, size = task.left_width, task.right_width, carray(elements, (1,)).itemsize
    step = lefts_of_a_vector(K, J)
    first, last = part_of_rows(task.num_rows, task.num_parts, index)
    total = np.empty(J, np.float32)
    for n in range(first * task.num_blocks, last * task.num_blocks):
        left, right, pairs = task.left + size * n * K, task.right + size * n * J, task.pairs + size * n * K * J
        total[:] = ZERO
        contract_block(elements, left, right, pairs, task.dleft + size * n * K, total.ctypes.data, K, J, size, step)
        dright = carray(like(elements, task.dright + size * n * J), (J,))
        for j in range(J):
            dright[j] = narrow(total[j], dright[j])
