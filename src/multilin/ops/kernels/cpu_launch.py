"""Compile and start the CPU kernels. numba is imported here, not earlier."""

import ctypes
import functools
import hashlib
import itertools
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import cfunc, njit, prange, types
from numba.core import event
from numba.extending import intrinsic
from torch import Tensor

from multilin.ops.dispatch import warn_once
from multilin.ops.kernels import is_forked
from multilin.ops.kernels.cpu_intrinsics import SCALARS, TaskType

SMALL = 2**15  # elements up to which waking a second thread takes longer than the work
COMPILING = "CPU kernels: compiling for this processor, once; this takes some seconds"
_ELEMENTS = {
    torch.float32: types.float32, torch.bfloat16: types.uint16, torch.int8: types.int8, torch.int32: types.int32,
    torch.int64: types.int64,
}  # fmt: skip
_WORDS = {int: ctypes.c_int64, bool: ctypes.c_int64, float: ctypes.c_double}
_Kernel = Callable[..., None]


def num_threads(num_elements: int) -> int:
    """The number of threads for tensors of this size: PyTorch's number, or 1 for little work or in a forked process."""
    if num_elements <= SMALL or is_forked():
        return 1
    return min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)


def launch_parts(
    kernel: _Kernel, num_elements: int, *arguments: Tensor | float | None, num_parts: int | None = None
) -> None:
    """Call a kernel for each part of its work, on the threads that `num_threads` gives for tensors of this size.

    Args:
        kernel: as for `launch`; `arguments_of(task)` gives it the number of parts and then the arguments.
        num_elements: size of the tensors; nothing is done if it is 0.
        arguments: numbers, and contiguous tensors as arrays (rows, last axis) or vectors; None is an empty vector.
        num_parts: number of parts of the work; None is one part for each thread.
    """
    if num_elements == 0:
        return
    threads = num_threads(num_elements)
    words: list[Any] = [threads if num_parts is None else num_parts]
    kinds: list[Any] = [int]
    for argument in arguments:
        if isinstance(argument, Tensor):
            *rows, width = argument.shape
            words.append(argument.data_ptr())
            if rows:
                words.append(argument.numel() // width if width else rows[0])
            words.append(width)
            kinds.append((argument.dtype, bool(rows)))
        elif argument is None:
            words += 0, 0
            kinds.append((torch.float32, False))
        else:
            words.append(argument)
            kinds.append(type(argument))
    address, function, structure = _compiled(kernel, tuple(kinds))
    _start(address, function, structure(*words), words[0], threads)


def launch(kernel: _Kernel, task: ctypes.Structure, dtype: torch.dtype, times: int, threads: int) -> None:
    """Call kernel(task, elements, index, sources) for index = 0 .. times - 1, on `threads` threads.

    The task is a structure of 64-bit numbers; elements is a null pointer, whose type tells the dtype of the numbers:
    float32 or bf16.
    """
    address, function, _ = _compiled(kernel, (type(task), dtype))
    _start(address, function, task, times, threads)


def _start(address: int, function: Callable[..., None], task: ctypes.Structure, times: int, threads: int) -> None:
    p_task = ctypes.addressof(task)
    if threads == 1 or times == 1:
        for index in range(times):
            function(p_task, None, index, None)
        return
    threads_of_torch = torch.get_num_threads()
    numba.set_num_threads(threads)
    _parallel()(address, p_task, times)
    if torch.get_num_threads() != threads_of_torch:
        # Numba's threads use the same OpenMP as PyTorch; starting them sets the number of threads of the process.
        torch.set_num_threads(threads_of_torch)


@functools.cache
def _compiled(kernel: _Kernel, kinds: tuple[Any, ...]) -> tuple[int, Callable[..., None], Any]:
    """The kernel's address, the kernel as a ctypes function, and the structure of its task."""
    if kinds[0] is int:
        words = [[ctypes.c_int64] * (2 + kind[1]) if isinstance(kind, tuple) else [_WORDS[kind]] for kind in kinds]
        fields = [(str(i), word) for i, word in enumerate(itertools.chain(*words))]
        structure: Any = type("Task", (ctypes.Structure,), {"_fields_": fields})
        numbers = {int: types.int64, bool: types.int64, float: types.float64}
        arguments = [
            types.Array(_ELEMENTS[kind[0]], 1 + kind[1], "C") if isinstance(kind, tuple) else numbers[kind]
            for kind in kinds
        ]
        task, elements = TaskType(tuple(arguments), _source_digest()), types.voidptr
    else:
        structure = kinds[0]
        task = types.CPointer(numba.from_dtype(np.dtype(structure)))
        elements = types.CPointer(_ELEMENTS[kinds[1]])
    signature = types.void(task, elements, types.int64, types.Opaque(_source_digest()))
    with _announced():
        compiled = cfunc(signature, cache=True, **SCALARS)(_with_own_cache_file(kernel, str(signature)))
    prototype = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
    return compiled.address, prototype(compiled.address), structure


@functools.cache
def _source_digest() -> str:
    """Hash of the sources of all CPU kernels; numba's own cache checks only the file of the compiled function."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.parent.glob("*/cpu*.py")):
        digest.update(path.read_bytes())
    return f"kernels {digest.hexdigest()}"


def _with_own_cache_file(function: Callable[..., Any], argument_types: str) -> Callable[..., Any]:
    """A copy of the function that numba caches in separate files for these types of arguments.

    Numba numbers the files of a function in one index, without a lock: if two processes compile for different
    types at the same time, one may store its code under the number that the other has entered for its types. A process
    that loads this code damages memory. With separate files, both processes write the same code.
    """
    copy = FunctionType(function.__code__, function.__globals__, function.__name__)
    copy.__qualname__ = f"{function.__qualname__}_{hashlib.sha256(argument_types.encode()).hexdigest()[:16]}"
    return copy


class _Announcement(event.Listener):
    """Warns once per process when a kernel is not in the cache on disk and must be compiled, which takes seconds."""

    def on_start(self, event: Any) -> None:
        warn_once(COMPILING)

    def on_end(self, event: Any) -> None:
        pass


_announced = functools.partial(event.install_listener, "numba:compile", _Announcement())


@intrinsic
def _call(typing_context: Any, address: Any, p_task: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        kernel = ir.FunctionType(ir.VoidType(), [pointer, pointer, ir.IntType(64), pointer]).as_pointer()
        nothing = ir.Constant(pointer, None)
        task = builder.inttoptr(arguments[1], pointer)
        builder.call(builder.inttoptr(arguments[0], kernel), [task, nothing, arguments[2], nothing])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@functools.cache
def _parallel() -> Any:
    """The only function that numba compiles as parallel, which takes seconds: it calls any kernel by its address."""
    with _announced():
        _call_in_parallel.compile((types.int64, types.int64, types.int64))
    return _call_in_parallel


@njit(parallel=True, cache=True)
def _call_in_parallel(address: int, p_task: int, times: int) -> None:
    for index in prange(times):
        _call(address, p_task, index)
