"""The alias names in the CPU kernels of prefix_softmax are true: run in Python, with every access recorded.

The compiler is told that arrays of different names never overlap, so a wrong name can silently give wrong numbers.
"""

import ctypes
import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from multilin.ops.kernels import why_no_numba
from multilin.ops.prefix_softmax import cpu, operator, reference
from multilin.ops.prefix_softmax.cpu import TENSORS, Task
from tests.ops.cases.prefix_softmax import make_logits, make_starts, make_values

pytestmark = pytest.mark.skipif(why_no_numba() is not None, reason=str(why_no_numba()))


class Memory:
    """`get` and `put`, and the names under which each address was read and written."""

    def __init__(self) -> None:
        self.names: dict[int, set[str]] = defaultdict(set)
        self.written: set[int] = set()
        self.arrays: dict[int, Any] = {}  # kept alive, so that no address is given to another array

    def _place(self, array: np.ndarray, index: int, name: str) -> np.ndarray:
        flat = array.reshape(-1)
        assert flat.base is not None, "a copy: the array is not contiguous"
        owner = array if array.base is None else array.base
        self.arrays[id(owner)] = owner
        self.names[flat.ctypes.data + index * flat.itemsize].add(name)
        return flat

    def get(self, array: np.ndarray, index: int, name: str) -> Any:
        number = self._place(array, index, name)[index]
        return np.uint32(int(number) << 16).view(np.float32) if array.dtype == np.uint16 else number

    def put(self, array: np.ndarray, index: int, number: Any, name: str) -> None:
        flat = self._place(array, index, name)
        flat[index] = int(np.float32(number).view(np.uint32)) >> 16 if array.dtype == np.uint16 else number
        self.written.add(flat.ctypes.data + index * flat.itemsize)

    def wrong(self) -> list[set[str]]:
        """The names of each address that was written, and has more than one."""
        return [names for address, names in self.names.items() if address in self.written and len(names) > 1]


def array_at(address: int, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    number = {2: ctypes.c_uint16, 4: ctypes.c_float}[np.dtype(dtype).itemsize]
    return np.ctypeslib.as_array((number * math.prod(shape)).from_address(address)).reshape(shape)


def task_of(tasks: list[Task], index: int, is_summary: bool) -> Task:
    task, parts = Task.from_buffer_copy(tasks[0]), tasks[0].num_parts
    parts = parts * (parts - 1) if is_summary else parts
    for name in TENSORS:
        if getattr(task, name):
            setattr(task, name, getattr(task, name) + index // parts * getattr(task, f"{name}_batch"))
    task.part = index % parts
    return task


@pytest.fixture
def memories(monkeypatch: pytest.MonkeyPatch) -> list[Memory]:
    """The memory of every kernel that was started; from now on they run in Python, as for two threads."""
    from numba.core.dispatcher import Dispatcher

    from multilin.ops.prefix_softmax import cpu_global, cpu_math, cpu_sums, cpu_windowed

    launches: list[Memory] = []
    replaced = {
        "get": lambda *arguments: launches[-1].get(*arguments),
        "put": lambda *arguments: launches[-1].put(*arguments),
        "task_of": task_of,
        "row": lambda dtype, address, *shape: array_at(address, shape, dtype),
        "floats": lambda address, *shape: array_at(address, shape),
        "exp_negative": lambda x: np.float32(math.exp(x)),
        "rounded_like": lambda x, array: x,
    }
    for module in (cpu_math, cpu_sums, cpu_global, cpu_windowed):
        for name, value in list(vars(module).items()):
            if name in replaced or isinstance(value, Dispatcher):
                monkeypatch.setattr(module, name, replaced.get(name) or value.py_func)

    def launch(kernel: Any, task: Task, dtype: torch.dtype, times: int, threads: int) -> None:
        for index in range(times):
            launches.append(Memory())
            kernel([task], np.float32 if dtype == torch.float32 else np.uint16, index, None)

    monkeypatch.setattr(cpu, "_launcher", SimpleNamespace(launch=launch, num_threads=lambda size: 2))
    return launches


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("window", "more"), [(None, {}), (None, {"null_logit": 0.3}), (None, {"own": 1}), (5, {}), (70, {})]
)
def test_no_number_that_is_written_has_two_names(
    window: int | None, more: dict[str, float], dtype: torch.dtype, memories: list[Memory]
) -> None:
    logits, values = make_logits("random", (1, 130, 2)).float(), make_values((1, 130, 2, 2)).to(dtype)
    own = make_logits("random", (1, 130, 2), seed=3).float() if "own" in more else None
    options = {"window": window, "null_logit": more.get("null_logit"), "starts": make_starts((1, 130), share=0.02)}
    exact, _ = reference.prefix_softmax(
        logits.double(), values.double(), own_logits=None if own is None else own.double(), **options
    )
    inputs = [x.requires_grad_() for x in (logits, values, own) if x is not None]
    means, after = operator.prefix_softmax("cpu", logits, values, own_logits=own, **options)
    torch.testing.assert_close(means.double(), exact, rtol=0.02, atol=0.02)
    torch.autograd.grad(means.float().sum() + after.values_BSHD.sum(), inputs)
    assert len(memories) == (8 if window is None else 4)
    assert [memory.wrong() for memory in memories] == [[]] * len(memories)


def test_a_second_name_is_found() -> None:
    memory, array = Memory(), np.zeros((2, 3), np.float32)
    memory.get(array[1:], 0, "running")
    memory.get(array, 3, "later")
    assert memory.wrong() == []
    memory.put(array, 3, 1.0, "later")
    assert memory.wrong() == [{"later", "running"}]
