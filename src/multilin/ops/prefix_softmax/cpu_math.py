"""Steps that the CPU kernels of the prefix softmax share: rows in memory, names of arrays, weights of running means.

A kernel computes a group of positions in two stages. The first stage turns logits into weights in [0, 1]: (rows, H)
scalars, with the heads in the SIMD lanes. Only this stage handles text starts, padding, windows and the null token. The
second stage multiplies vectors by these weights and sums the products.

Names: `i` row of the group, `h` head, `d` component of a head, `k` component of all heads together.
"""

import ctypes

import numpy as np
from numba import carray, njit, types
from numba.extending import intrinsic

from multilin.ops.kernels.cpu_intrinsics import (
    LOWEST,
    NOTHING,
    ONE,
    SCALARS,
    TINY,
    ZERO,
    array,
    exp_negative,
    floats,
    from_bf16,
    pointer_to,
    to_bf16,
)
from multilin.ops.prefix_softmax.cpu import TENSORS, Task

TASK_SIZE, NUM_TENSORS = ctypes.sizeof(Task), len(TENSORS)

# Names of arrays for `get` and `put`. The compiler vectorises a loop only if its stores cannot change its loads, and
# checking that in every row took longer than the work. A kernel must always use the same name for an array:
# tests/ops/test_prefix_softmax_names.py runs the kernels in Python and compares all addresses.
NAMES = (
    "values", "means", "dmeans", "dvalues", "past", "running", "later", "rounding", "logits", "top", "total", "tops",
    "totals", "new", "old", "weights", "decays", "other tops", "other totals", "prefix", "suffix",
)  # fmt: skip


@intrinsic
def rounded_like(typing_context, number, array):
    """The value that a float32 has after storing it in the array and reading it again."""

    def generate(context, builder, signature, arguments):
        number = arguments[0]
        return number if array.dtype == types.float32 else from_bf16(builder, to_bf16(builder, number))

    return types.float32(types.float32, array), generate


def _element(context, builder, array, value, index):
    return builder.gep(context.make_array(array)(context, builder, value).data, [index])


def _mark(module, instruction, name):
    domain = module.add_metadata(["arrays"])
    scopes = {name: module.add_metadata([name, domain]) for name in NAMES}
    instruction.set_metadata("alias.scope", module.add_metadata([scopes.pop(name)]))
    instruction.set_metadata("noalias", module.add_metadata(list(scopes.values())))


@intrinsic(prefer_literal=True)
def get(typing_context, array, index, name):
    """Load an element of a contiguous array, bf16 as float32. Arrays of different names never overlap (see `NAMES`)."""

    def generate(context, builder, signature, arguments):
        number = builder.load(_element(context, builder, array, *arguments[:2]))
        _mark(builder.module, number, name.literal_value)
        return from_bf16(builder, number) if array.dtype == types.uint16 else number

    result = types.float32 if array.dtype == types.uint16 else array.dtype
    return result(array, types.int64, name), generate


@intrinsic(prefer_literal=True)
def put(typing_context, array, index, number, name):
    """Store a number in a contiguous array. Arrays of different names never overlap (see `NAMES`)."""

    def generate(context, builder, signature, arguments):
        number = to_bf16(builder, arguments[2]) if array.dtype == types.uint16 else arguments[2]
        place = _element(context, builder, array, *arguments[:2])
        _mark(builder.module, builder.store(number, place), name.literal_value)
        return context.get_dummy_value()

    stored = types.float32 if array.dtype == types.uint16 else array.dtype
    return types.void(array, types.int64, stored, name), generate


@njit
def task_of(tasks, index, is_summary):
    """The task for one `index` of a launch, with its part (or piece) of the time and the tensors of its text.

    The result is a copy in separate memory; for index 0, it is the given task itself: the first part of the first text.
    """
    copies = carray(tasks, (index + 1,))
    if index > 0:
        num_parts = copies[0].num_parts
        if is_summary:
            num_parts *= num_parts - 1
        copies[index] = copies[0]
        copies[index].part = index % num_parts
        tensors = array(np.int64, copies.ctypes.data + TASK_SIZE * index, (NUM_TENSORS, 3))
        for i in range(NUM_TENSORS):
            if tensors[i, 0] != 0:
                tensors[i, 0] += index // num_parts * tensors[i, 1]
    return copies[index]


@njit
def row(values, address, num_heads, width):
    """The (H, D) array at an address, of the type that the pointer `values` points to."""
    return carray(pointer_to(values, address), (num_heads, width))


@njit
def weights(task, kind, first, num_rows):
    """The rows (rows, H) of one kind of weights, among the weights kept for the backward pass."""
    return floats(task.weights + 4 * task.num_heads * (kind * task.num_time + first), num_rows, task.num_heads)


@njit
def starts_at(task, t):
    """True where a text starts; always False without starts (address 0)."""
    return task.starts != 0 and floats(task.starts + 4 * t, 1, 1)[0, 0] != ZERO


@njit(**SCALARS)
def larger(x, y):
    """The larger of two numbers, as one instruction: `max` also has to handle nan."""
    return x if x > y else y


@njit(**SCALARS)
def exponentials(numbers):
    """Replace each number x <= 0 by e^x."""
    for i in range(numbers.size):
        numbers[i] = exp_negative(numbers[i])


@njit(forceinline=True, **SCALARS)
def raise_top(logits, forgets, top, new, old, tops, i):
    """In row i, update the running maximum; store the logs of the new weight and of the factor for the old weights."""
    for h in range(top.size):
        j = i * top.size + h
        before, x = LOWEST if forgets else get(top, h, "top"), get(logits, h, "logits")
        after = larger(before, x)
        put(old, j, LOWEST if forgets else before - after, "old")
        put(new, j, x - after, "new")
        put(top, h, after, "top")
        put(tops, j, after, "tops")


@njit(forceinline=True, **SCALARS)
def share_out(total, new, old, totals, w, a, i):
    """In row i, turn e^(l - top) and e^(old top - top) into the weights w and a; sum the total in float64.

    The weight a of the past is computed directly: 1 - w would round it to 0 after a large logit.
    """
    for h in range(total.size):
        j = i * total.size + h
        x, past = get(new, j, "new"), get(total, h, "total") * get(old, j, "old")
        sum_of_both = past + x
        put(total, h, sum_of_both, "total")
        put(totals, j, np.float32(sum_of_both), "totals")
        scale = 1.0 / (sum_of_both if sum_of_both > TINY else TINY)
        put(w, j, np.float32(x * scale), "weights")
        put(a, j, np.float32(past * scale), "decays")


@njit(**SCALARS)
def prefix_weights(task, block, first, top, total, scratch, tops, totals, w, a):
    """Compute w_t = e^(l_t - L_t), a_t = e^(L_(t-1) - L_t) from row `first` on; L_t: log of the total weight up to t.

    The past is forgotten at text starts and, if `block` is not 0, at block starts; `first` is the start of a block.
    `top` and `total` hold L from one call to the next; `tops` and `totals` (rows, H) receive L of every row.
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
    """Compute the weights g of prefixes and s of suffixes at all positions, given a null token of logit `null`."""
    has_null = null > NOTHING
    for j in range(g.size):
        x, y = get(tops, j, "tops"), get(other_tops, j, "other tops")
        top = larger(x, y)
        if has_null:
            top = larger(top, null)
        prefix = get(totals, j, "totals") * exp_negative(x - top)
        suffix = get(other_totals, j, "other totals") * exp_negative(y - top)
        total = prefix + suffix
        if has_null:
            total += exp_negative(null - top)
        scale = ONE / total if total > ZERO else ZERO
        put(g, j, prefix * scale, "prefix")
        put(s, j, suffix * scale, "suffix")
