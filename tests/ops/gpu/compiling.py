"""Compile kernels for a Hopper card where there is none: what they are started with is recorded, nothing runs.

    python -m tests.ops.gpu.compiling MODULE

imports the module, in a process where Triton does not interpret, and calls its `call_every_kernel()`.
"""

import importlib
import sys
from functools import partialmethod
from typing import Any

import torch

from tests.ops.gpu.conftest import run_one_way

NAMES = {
    torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
    torch.int32: "i32", torch.int8: "i8", torch.uint8: "u8", torch.bool: "i1",
}  # fmt: skip


def type_of(value: Any, place: tuple[int, ...], constants: dict[tuple[int, ...], Any]) -> Any:
    """The type that Triton gives an argument, or a tuple of arguments; None becomes a constant."""
    if isinstance(value, tuple):
        members = [type_of(member, (*place, i), constants) for i, member in enumerate(value)]
        return type(value)(*members) if hasattr(value, "_fields") else tuple(members)
    if value is None:
        constants[place] = None
        return "constexpr"
    if isinstance(value, torch.Tensor):
        return f"*{NAMES[value.dtype]}"
    return "fp32" if isinstance(value, float) else "i32"


def compile_instead_of_running() -> None:
    """From now on, starting a kernel compiles it, in the first way that would be tried."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    compiled: set[str] = set()

    def compile_kernel(self: Any, *args: Any, grid: Any, warmup: bool, num_warps: int = 4, num_stages: int = 3, **more):
        bound = dict(zip(self.arg_names, args, strict=False)) | more
        signature: dict[str, Any] = {}
        constants: dict[tuple[int, ...], Any] = {}
        for index, parameter in enumerate(self.params):
            value = bound[parameter.name]
            if parameter.is_constexpr:
                signature[parameter.name], constants[(index,)] = "constexpr", value
            else:
                signature[parameter.name] = type_of(value, (index,), constants)
        kind = f"{self.fn.__module__}.{self.fn.__name__} {signature} {constants}"
        if kind not in compiled:
            compiled.add(kind)
            source = ASTSource(self, signature, constants, {})
            options = {"num_warps": num_warps, "num_stages": num_stages}
            kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
            assert kernel.metadata.shared <= 227 * 1024, f"{kind} needs {kernel.metadata.shared} bytes of shared memory"
            print(f"{self.fn.__name__}: {kernel.metadata.shared} bytes of shared memory")

    JITFunction.run, Autotuner.run = compile_kernel, partialmethod(run_one_way, 0)


if __name__ == "__main__":
    compile_instead_of_running()
    importlib.import_module(sys.argv[1]).call_every_kernel()
