"""What the CPU kernels of the prefix softmax share: rows in memory, bf16, the exponential, weights of running means.

A kernel has two stages for a piece of time. The first turns logits into weights in [0, 1], (rows, H) scalars with the
heads in the SIMD lanes; text starts, padding, windows and the null token exist there only. The second moves vectors,
and is nothing but multiplications and additions with those weights.

Names: `p_` address or pointer, `i` row of a piece, `h` head, `d` component.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from multilin.ops.kernels.cpu_intrinsics import DOTS as DOTS
from multilin.ops.kernels.cpu_intrinsics import SCALARS as SCALARS
from multilin.ops.kernels.cpu_intrinsics import exp_negative as exp_negative
from multilin.ops.kernels.cpu_intrinsics import floats as floats
from multilin.ops.kernels.cpu_intrinsics import from_bf16, to_bf16
from multilin.ops.kernels.cpu_intrinsics import pointer_to as like

LOWEST = np.float32(np.finfo(np.float32).min)
ZERO, ONE, NOTHING = np.float32(0), np.float32(1), np.float32(-np.inf)
TINY = 1e-300

# NAMES of arrays for `get` and `put`. The compiler vectorises a loop only if what is stored in it cannot change what is
# read, and checking that in every row took longer than the work. One array must have one name in all of a kernel.
VALUES, MEANS, DMEANS, DVALUES, RUNNING, LATER, ROUNDING = range(7)
LOGITS, TOP, TOTAL, TOPS, TOTALS, WEIGHTS, DECAYS, OTHER_TOPS, OTHER_TOTALS = range(7, 16)
NUM_NAMES = 16


@intrinsic
def _to_byte_pointer(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.CPointer(types.uint8)(types.int64), generate


@intrinsic
def rounded_like(typing_context: Any, number: Any, array: Any) -> Any:
    """A float32 after it was stored in the array and read again."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number = arguments[0]
        return number if array.dtype == types.float32 else from_bf16(builder, to_bf16(builder, number))

    return types.float32(types.float32, array), generate


def _element(context: Any, builder: Any, array: Any, value: Any, index: Any) -> Any:
    return builder.gep(context.make_array(array)(context, builder, value).data, [index])


def _mark(module: Any, instruction: Any, name: int) -> None:
    domain = module.add_metadata(["arrays"])
    scopes = [module.add_metadata([f"array {i}", domain]) for i in range(NUM_NAMES)]
    instruction.set_metadata("alias.scope", module.add_metadata([scopes[name]]))
    instruction.set_metadata("noalias", module.add_metadata([x for x in scopes if x is not scopes[name]]))


@intrinsic(prefer_literal=True)
def get(typing_context: Any, array: Any, index: Any, name: Any) -> Any:
    """Number `index` of a contiguous array; bf16 in float32. Arrays of different names never overlap (see NAMES)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number = builder.load(_element(context, builder, array, *arguments[:2]))
        _mark(builder.module, number, name.literal_value)
        return from_bf16(builder, number) if array.dtype == types.uint16 else number

    result = types.float32 if array.dtype == types.uint16 else array.dtype
    return result(array, types.int64, name), generate


@intrinsic(prefer_literal=True)
def put(typing_context: Any, array: Any, index: Any, number: Any, name: Any) -> Any:
    """Store number `index` of a contiguous array. Arrays of different names never overlap (see NAMES)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number = to_bf16(builder, arguments[2]) if array.dtype == types.uint16 else arguments[2]
        place = _element(context, builder, array, *arguments[:2])
        _mark(builder.module, builder.store(number, place), name.literal_value)
        return context.get_dummy_value()

    stored = types.float32 if array.dtype == types.uint16 else array.dtype
    return types.void(array, types.int64, stored, name), generate


@njit
def row(values: Any, address: int, num_heads: int, width: int) -> Any:
    """The (H, D) array at an address, of the type that the pointer `values` points to."""
    return carray(like(values, address), (num_heads, width))


@njit
def starts_at(p_starts: int, time: int) -> bool:
    """True where a text starts; never, where there are no starts (address 0)."""
    return p_starts != 0 and carray(_to_byte_pointer(p_starts), (time + 1,))[time] != 0


@njit
def assign(target: Any, source: Any) -> None:
    """Copy a matrix: `target[:] = source` may fail, and its error message takes longer to compile than all else."""
    for i in range(target.shape[0]):
        for j in range(target.shape[1]):
            target[i, j] = source[i, j]


@njit(**SCALARS)
def larger(x: Any, y: Any) -> Any:
    """The larger of two numbers, as one instruction: `max` also has to think of nan."""
    return x if x > y else y


@njit(**SCALARS)
def exponentials(numbers: Any) -> None:
    """e^x of numbers <= 0, in place."""
    for i in range(numbers.size):
        numbers[i] = exp_negative(numbers[i])


@njit(forceinline=True, **SCALARS)
def raise_top(logits: Any, forgets: bool, top: Any, w: Any, a: Any, tops: Any, i: int) -> None:
    """Row i: running maximum, and the exponents of the new weight and of what rescales the old ones."""
    for h in range(top.size):
        j = i * top.size + h
        old, x = LOWEST if forgets else get(top, h, TOP), get(logits, h, LOGITS)
        new = larger(old, x)
        put(a, j, LOWEST if forgets else old - new, DECAYS)
        put(w, j, x - new, WEIGHTS)
        put(top, h, new, TOP)
        put(tops, j, new, TOPS)


@njit(forceinline=True, **SCALARS)
def share_out(total: Any, w: Any, a: Any, totals: Any, i: int) -> None:
    """Row i: e^(l - top) in w and e^(old top - top) in a become shares of the new total, which is kept in float64.

    The share of the past is computed as such, never as 1 - w, which would lose it after a large logit.
    """
    for h in range(total.size):
        j = i * total.size + h
        x = get(w, j, WEIGHTS)
        old = get(total, h, TOTAL) * get(a, j, DECAYS)
        new = old + x
        put(total, h, new, TOTAL)
        put(totals, j, np.float32(new), TOTALS)
        scale = 1.0 / (new if new > TINY else TINY)
        put(w, j, np.float32(x * scale), WEIGHTS)
        put(a, j, np.float32(old * scale), DECAYS)


@njit(**SCALARS)
def prefix_weights(
    p_logits: int, logits_step: int, p_starts: int, block: int, first: int,
    top: Any, total: Any, w: Any, a: Any, tops: Any, totals: Any,
) -> None:  # fmt: skip
    """w_t = e^(l_t - L_t), a_t = e^(L_(t-1) - L_t) of rows `first`..., L_t the log of the total weight up to t.

    The past is forgotten at text starts and, if `block` is not 0, at every block's; `first` is the start of one.
    `top` and `total` hold L between calls, `tops` and `totals` (rows, H) receive it.
    """
    num_rows, num_heads = w.shape
    offset = 0 if block != 0 else 1
    for i in range(num_rows):
        logits = floats(p_logits + logits_step * (first + i), 1, num_heads)
        raise_top(logits, offset == 0 or starts_at(p_starts, first + i), top, w, a, tops, i)
        offset = 0 if offset + 1 == block else offset + 1
    exponentials(w.reshape(w.size))
    exponentials(a.reshape(a.size))
    for i in range(num_rows):
        share_out(total, w, a, totals, i)


@njit(**SCALARS)
def two_shares(tops: Any, totals: Any, other_tops: Any, other_totals: Any, g: Any, s: Any) -> None:
    """Shares of two sources in all positions: prefix g, suffix s."""
    for j in range(g.size):
        x, y = get(tops, j, TOPS), get(other_tops, j, OTHER_TOPS)
        top = larger(x, y)
        prefix = get(totals, j, TOTALS) * exp_negative(x - top)
        suffix = get(other_totals, j, OTHER_TOTALS) * exp_negative(y - top)
        total = prefix + suffix
        scale = ONE / total if total > ZERO else ZERO
        put(g, j, prefix * scale, WEIGHTS)
        put(s, j, suffix * scale, DECAYS)


@njit(**SCALARS)
def four_shares(
    tops: Any, totals: Any, other_tops: Any, other_totals: Any, own: Any, null: Any, g: Any, s: Any, o: Any, n: Any
) -> None:
    """Shares of four sources in all positions: prefix g, suffix s, own token o, and null token n."""
    for j in range(g.size):
        x, y, z = get(tops, j, TOPS), get(other_tops, j, OTHER_TOPS), get(own, j, LOGITS)
        top = larger(larger(x, y), larger(z, null))
        prefix = get(totals, j, TOTALS) * exp_negative(x - top)
        suffix = get(other_totals, j, OTHER_TOTALS) * exp_negative(y - top)
        by_itself, nothing = exp_negative(z - top), exp_negative(null - top)
        total = prefix + suffix + by_itself + nothing
        scale = ONE / total if total > ZERO else ZERO
        put(g, j, prefix * scale, WEIGHTS)
        put(s, j, suffix * scale, DECAYS)
        put(o, j, by_itself * scale, VALUES)
        put(n, j, nothing * scale, RUNNING)


@njit(forceinline=True, **SCALARS)
def copy_row(target: Any, i: int, source: Any, j: int) -> None:
    """Row i of one matrix becomes row j of another."""
    for h in range(target.shape[1]):
        target[i, h] = source[j, h]


@njit(forceinline=True, **SCALARS)
def fill_row(target: Any, i: int, number: Any) -> None:
    """Row i becomes one number."""
    for h in range(target.shape[1]):
        target[i, h] = number
