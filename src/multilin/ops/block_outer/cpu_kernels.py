"""Kernels of `block_outer`: products of pairs in the order in which they multiply the weight, and back.

Their task: left (num_rows, num_blocks, left_width), right (num_rows, num_blocks, right_width), and the pairs, or their
gradient; dleft and dright like left and right. All are contiguous.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import numpy as np
from numba import carray, njit

from multilin.ops.block_outer.cpu_vectors import LANES, make_contract, make_expand
from multilin.ops.kernels.cpu_intrinsics import SCALARS, array, narrow, part_of_rows, pointer_to, widen

ZERO = np.float32(0)
expand_4, expand_8, expand_16 = make_expand(4), make_expand(8), make_expand(16)
contract_4, contract_8, contract_16 = make_contract(4), make_contract(8), make_contract(16)


@njit
def lefts_of_a_vector(left_width, right_width):
    """Numbers of the left block in a vector, 0 where blocks are not made of whole vectors."""
    if right_width != 4 and right_width != 8 and right_width != 16:
        return 0
    count = LANES // right_width
    return count if left_width % count == 0 else 0


@njit(forceinline=True, **SCALARS)
def expand_block(elements, left, right, pairs, K, J, size, step):
    """One block at these addresses, of numbers of `size` bytes."""
    p_right = pointer_to(elements, right)
    if step != 0:
        for k in range(0, K, step):
            p_left, p_pairs = pointer_to(elements, left + size * k), pointer_to(elements, pairs + size * k * J)
            if J == 4:
                expand_4(p_left, p_right, p_pairs)
            elif J == 8:
                expand_8(p_left, p_right, p_pairs)
            else:
                expand_16(p_left, p_right, p_pairs)
        return
    lefts, rights = array(elements, left, (K,)), carray(p_right, (J,))
    products = array(elements, pairs, (K, J))
    for k in range(K):
        number = widen(lefts[k])
        for j in range(J):
            products[k, j] = narrow(number * widen(rights[j]), products[k, j])


@njit(forceinline=True, **SCALARS)
def contract_block(elements, left, right, dpairs, dleft, total, K, J, size, step):
    """dleft of one block, and dright added to `total` in float32."""
    p_right, p_total = pointer_to(elements, right), pointer_to(np.float32, total)
    if step != 0:
        for k in range(0, K, step):
            p_left, p_dleft = pointer_to(elements, left + size * k), pointer_to(elements, dleft + size * k)
            p_dpairs = pointer_to(elements, dpairs + size * k * J)
            if J == 4:
                contract_4(p_dpairs, p_left, p_right, p_dleft, p_total)
            elif J == 8:
                contract_8(p_dpairs, p_left, p_right, p_dleft, p_total)
            else:
                contract_16(p_dpairs, p_left, p_right, p_dleft, p_total)
        return
    lefts, rights = array(elements, left, (K,)), carray(p_right, (J,))
    dproducts, dlefts = array(elements, dpairs, (K, J)), array(elements, dleft, (K,))
    totals = carray(p_total, (J,))
    for k in range(K):
        number, dnumber = widen(lefts[k]), ZERO
        for j in range(J):
            dproduct = widen(dproducts[k, j])
            dnumber += dproduct * widen(rights[j])
            totals[j] += dproduct * number
        dlefts[k] = narrow(dnumber, dlefts[k])


@njit(forceinline=True, **SCALARS)
def expand_blocks(elements, left, right, pairs, first, last, K, J, size):
    """Blocks first .. last - 1 of tensors at these addresses, of numbers of `size` bytes."""
    step = lefts_of_a_vector(K, J)
    for n in range(first, last):
        expand_block(elements, left + size * n * K, right + size * n * J, pairs + size * n * K * J, K, J, size, step)


@njit(forceinline=True, **SCALARS)
def contract_blocks(elements, left, right, dpairs, dleft, dright, first, last, K, J, size):
    """Gradients of both factors in blocks first .. last - 1 of tensors at these addresses."""
    step = lefts_of_a_vector(K, J)
    total = np.empty(J, np.float32)
    for n in range(first, last):
        p_left, p_right, p_dpairs = left + size * n * K, right + size * n * J, dpairs + size * n * K * J
        total[:] = ZERO
        contract_block(elements, p_left, p_right, p_dpairs, dleft + size * n * K, total.ctypes.data, K, J, size, step)
        drights = array(elements, dright + size * n * J, (J,))
        for j in range(J):
            drights[j] = narrow(total[j], drights[j])


def expand(tasks, elements, index, sources):
    """Pairs of one part of the rows."""
    task = carray(tasks, (1,))[0]
    size, N = carray(elements, (1,)).itemsize, task.num_blocks
    first, last = part_of_rows(task.num_rows, task.num_parts, index)
    expand_blocks(
        elements, task.left, task.right, task.pairs, first * N, last * N, task.left_width, task.right_width, size
    )


def contract(tasks, elements, index, sources):
    """Gradients of both factors in one part of the rows."""
    task = carray(tasks, (1,))[0]
    size, N, K, J = carray(elements, (1,)).itemsize, task.num_blocks, task.left_width, task.right_width
    first, last = part_of_rows(task.num_rows, task.num_parts, index)
    contract_blocks(
        elements, task.left, task.right, task.pairs, task.dleft, task.dright, first * N, last * N, K, J, size
    )
