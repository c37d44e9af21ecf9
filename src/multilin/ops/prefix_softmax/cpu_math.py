"""Steps that the CPU kernels of the prefix softmax share: rows in memory, alias names, weights of running means.

A kernel has two stages for some positions. The first turns logits into weights in [0, 1], (rows, H) scalars with the
heads in the SIMD lanes; text starts, padding, windows and the null token exist there only. The second moves vectors,
and is nothing but multiplications and additions with those weights.

Names: `i` row of the positions at hand, `h` head, `d` component, `k` component of all heads together.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import numpy as np
from numba import carray, njit, types
from numba.extending import intrinsic

from multilin.ops.kernels.cpu_intrinsics import DOTS as DOTS
from multilin.ops.kernels.cpu_intrinsics import SCALARS as SCALARS
from multilin.ops.kernels.cpu_intrinsics import array, from_bf16, to_bf16
from multilin.ops.kernels.cpu_intrinsics import exp_negative as exp_negative
from multilin.ops.kernels.cpu_intrinsics import floats as floats
from multilin.ops.kernels.cpu_intrinsics import pointer_to as like
from multilin.ops.prefix_softmax.cpu_task import FIRST_TENSOR, NUM_NUMBERS, NUM_TENSORS

LOWEST = np.float32(np.finfo(np.float32).min)
ZERO, ONE, NOTHING = np.float32(0), np.float32(1), np.float32(-np.inf)
TINY = 1e-300
PAGE = 4096  # bytes

# NAMES of arrays for `get` and `put`. The compiler vectorises a loop only if its stores cannot change its loads, and
# checking that in every row took longer than the work. One array must have one name in all of a kernel:
# tests/ops/test_prefix_softmax_names.py runs the kernels in Python and compares all addresses.
VALUES, MEANS, DMEANS, DVALUES, RUNNING, LATER, ROUNDING = range(7)
LOGITS, TOP, TOTAL, TOPS, TOTALS, NEW, OLD, WEIGHTS, DECAYS, OTHER_TOPS, OTHER_TOTALS, PREFIX, SUFFIX = range(7, 20)
NUM_NAMES = 20


@intrinsic
def rounded_like(typing_context, number, array):
    """A float32 after it was stored in the array and read again."""

    def generate(context, builder, signature, arguments):
        number = arguments[0]
        return number if array.dtype == types.float32 else from_bf16(builder, to_bf16(builder, number))

    return types.float32(types.float32, array), generate


def _element(context, builder, array, value, index):
    return builder.gep(context.make_array(array)(context, builder, value).data, [index])


def _mark(module, instruction, name):
    domain = module.add_metadata(["arrays"])
    scopes = [module.add_metadata([f"array {i}", domain]) for i in range(NUM_NAMES)]
    instruction.set_metadata("alias.scope", module.add_metadata([scopes[name]]))
    instruction.set_metadata("noalias", module.add_metadata([x for x in scopes if x is not scopes[name]]))


@intrinsic(prefer_literal=True)
def get(typing_context, array, index, name):
    """Number `index` of a contiguous array; bf16 in float32. Arrays of different names never overlap (see NAMES)."""

    def generate(context, builder, signature, arguments):
        number = builder.load(_element(context, builder, array, *arguments[:2]))
        _mark(builder.module, number, name.literal_value)
        return from_bf16(builder, number) if array.dtype == types.uint16 else number

    result = types.float32 if array.dtype == types.uint16 else array.dtype
    return result(array, types.int64, name), generate


@intrinsic(prefer_literal=True)
def put(typing_context, array, index, number, name):
    """Store number `index` of a contiguous array. Arrays of different names never overlap (see NAMES)."""

    def generate(context, builder, signature, arguments):
        number = to_bf16(builder, arguments[2]) if array.dtype == types.uint16 else arguments[2]
        place = _element(context, builder, array, *arguments[:2])
        _mark(builder.module, builder.store(number, place), name.literal_value)
        return context.get_dummy_value()

    stored = types.float32 if array.dtype == types.uint16 else array.dtype
    return types.void(array, types.int64, stored, name), generate


@njit
def task_of(tasks, index, is_summary):
    """The task of piece of work `index`, with its part of the time and the tensors of its text.

    It is a copy in a place of its own, but for index 0, which is the first part of the first text as it stands.
    """
    copies = carray(tasks, (index + 1,))
    if index > 0:
        num_parts = copies[0].num_parts
        if is_summary:
            num_parts *= num_parts - 1
        copies[index] = copies[0]
        copies[index].part = index % num_parts
        first = copies.ctypes.data + 8 * (NUM_NUMBERS * index + FIRST_TENSOR)
        tensors = array(np.int64, first, (NUM_TENSORS, 3))
        for i in range(NUM_TENSORS):
            if tensors[i, 0] != 0:
                tensors[i, 0] += index // num_parts * tensors[i, 1]
    return copies[index]


@njit
def row(values, address, num_heads, width):
    """The (H, D) array at an address, of the type that the pointer `values` points to."""
    return carray(like(values, address), (num_heads, width))


@njit
def weights(task, kind, first, num_rows):
    """Rows of one kind of the weights kept for the backward pass, (rows, H)."""
    return floats(task.weights + 4 * task.num_heads * (kind * task.num_time + first), num_rows, task.num_heads)


@njit
def starts_at(task, t):
    """True where a text starts; never, where there are no starts (address 0)."""
    return task.starts != 0 and floats(task.starts + 4 * t, 1, 1)[0, 0] != ZERO


@njit
def zeros_beside(address, num_heads, width):
    """Zeros (H, D) at the same place in a page of memory as an address.

    Processors compare the last 12 bits of addresses first, so stores elsewhere in the page may hold up loads of
    rows: where the allocator happened to place the array so, the backward pass took 1.2 times as long.
    """
    size = num_heads * width
    room = np.zeros(size + PAGE // 4, np.float32)
    first = (address - room.ctypes.data) % PAGE // 4
    return room[first : first + size].reshape((num_heads, width))


@njit
def assign(target, source):
    """Copy a matrix: `target[:] = source` may fail, and its error message takes longer to compile than all else."""
    for i in range(source.shape[0]):
        for j in range(source.shape[1]):
            target[i, j] = source[i, j]


@njit(**SCALARS)
def larger(x, y):
    """The larger of two numbers, as one instruction: `max` also has to think of nan."""
    return x if x > y else y


@njit(**SCALARS)
def exponentials(numbers):
    """e^x of numbers <= 0, in place."""
    for i in range(numbers.size):
        numbers[i] = exp_negative(numbers[i])


@njit(forceinline=True, **SCALARS)
def raise_top(logits, forgets, top, new, old, tops, i):
    """Row i: running maximum, and the exponents of the new weight and of the factor for the old ones."""
    for h in range(top.size):
        j = i * top.size + h
        before, x = LOWEST if forgets else get(top, h, TOP), get(logits, h, LOGITS)
        after = larger(before, x)
        put(old, j, LOWEST if forgets else before - after, OLD)
        put(new, j, x - after, NEW)
        put(top, h, after, TOP)
        put(tops, j, after, TOPS)


@njit(forceinline=True, **SCALARS)
def share_out(total, new, old, totals, w, a, i):
    """Row i: e^(l - top) and e^(old top - top) become weights w, a in the new total, which is kept in float64.

    The weight of the past is computed as such, never as 1 - w, which would lose it after a large logit.
    """
    for h in range(total.size):
        j = i * total.size + h
        x, past = get(new, j, NEW), get(total, h, TOTAL) * get(old, j, OLD)
        sum_of_both = past + x
        put(total, h, sum_of_both, TOTAL)
        put(totals, j, np.float32(sum_of_both), TOTALS)
        scale = 1.0 / (sum_of_both if sum_of_both > TINY else TINY)
        put(w, j, np.float32(x * scale), WEIGHTS)
        put(a, j, np.float32(past * scale), DECAYS)


@njit(**SCALARS)
def prefix_weights(task, block, first, top, total, scratch, tops, totals, w, a):
    """w_t = e^(l_t - L_t), a_t = e^(L_(t-1) - L_t) of rows `first`..., L_t the log of the total weight up to t.

    The past is forgotten at text starts and, if `block` is not 0, at every block's; `first` is the start of one.
    `top` and `total` hold L between calls, `tops` and `totals` (rows, H) receive it.
    """
    num_rows, num_heads = tops.shape
    new, old, offset = scratch[0, :num_rows], scratch[1, :num_rows], 0 if block != 0 else 1
    for i in range(num_rows):
        logits = floats(task.logits + task.logits_row * (first + i), 1, num_heads)
        raise_top(logits, offset == 0 or starts_at(task, first + i), top, new, old, tops, i)
        offset = 0 if offset + 1 == block else offset + 1
    exponentials(new.reshape(new.size))
    exponentials(old.reshape(old.size))
    for i in range(num_rows):
        share_out(total, new, old, totals, w, a, i)


@njit(**SCALARS)
def merge_weights(tops, totals, other_tops, other_totals, null, g, s):
    """Weights of two sources in all positions, prefix g and suffix s, beside a null token of logit `null`."""
    has_null = null > NOTHING
    for j in range(g.size):
        x, y = get(tops, j, TOPS), get(other_tops, j, OTHER_TOPS)
        top = larger(x, y)
        if has_null:
            top = larger(top, null)
        prefix = get(totals, j, TOTALS) * exp_negative(x - top)
        suffix = get(other_totals, j, OTHER_TOTALS) * exp_negative(y - top)
        total = prefix + suffix
        if has_null:
            total += exp_negative(null - top)
        scale = ONE / total if total > ZERO else ZERO
        put(g, j, prefix * scale, PREFIX)
        put(s, j, suffix * scale, SUFFIX)
