"""The properties of this machine that decide how fast models run, and settings of its memory allocator."""

import ctypes
import importlib.metadata
import os
import platform
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch

from multilin.errors import plural
from multilin.ops.dispatch import all_ops
from multilin.ops.threads import available_cores
from multilin.training.precision import resolve_precision
from multilin.training.processes import accelerator_or_cpu

PACKAGES = (
    "multilin", "torch", "transformers", "tokenizers", "datasets", "accelerate", "safetensors", "numba", "triton",
    "tensorboard",
)  # fmt: skip
# Prefixes of instruction sets that decide how fast matrix products are, above all in bf16 and int8.
CPU_FEATURES = ("avx2", "avx512_f", "avx512_bf16", "avx512_vnni", "avx10", "amx", "sve", "bf16", "i8mm", "dotprod")
VARIABLE = "MULTILIN_ALLOCATOR"

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_MMAP_BYTES, _TRIM_BYTES = 2**30, 2**31 - 1


@dataclass(frozen=True)
class Checkup:
    """The properties of this machine.

    versions: version of each package; None if the package is not installed.
    device: the device that models run on. threads: PyTorch's threads on the CPU. cores: cores for this process.
    precision: the precision that `precision: auto` chooses on this machine.
    cpu_features: the processor's instruction sets among CPU_FEATURES.
    freed_memory: a sentence that says whether the command line keeps freed memory, see `keep_freed_memory`.
    backends: for each op, the name of its implementation on the device.
    gpu_backends: for each op, the name of its GPU implementation, and the reason if this machine does not use it.
    warnings: sentences about what makes this machine slow.
    """

    versions: dict[str, str | None]
    python: str
    platform: str
    device: str
    threads: int
    cores: int
    precision: str
    cpu_features: list[str]
    freed_memory: str
    backends: dict[str, str]
    gpu_backends: dict[str, str]
    warnings: list[str] = field(default_factory=list)


def examine() -> Checkup:
    """Find the properties of this machine."""
    device = accelerator_or_cpu()
    cores = available_cores()
    backends = {name: op.backend_for(device) for name, op in all_ops().items()}
    gives_back, capabilities = why_not(), torch.cpu.get_capabilities()
    warnings = [
        f"{name} uses its slow implementation, {backend.name}{reasons}"
        for name, backend in backends.items()
        if (reasons := _reasons(name, device))
    ]
    if torch.get_num_threads() < cores:
        warnings.append(f"PyTorch uses {torch.get_num_threads()} of {plural(cores, 'core')}; set OMP_NUM_THREADS")
    return Checkup(
        versions={name: installed_version(name) for name in PACKAGES}, python=platform.python_version(),
        platform=platform.platform(), device=device_name(device), threads=torch.get_num_threads(), cores=cores,
        precision=resolve_precision("auto"),
        cpu_features=sorted(k for k, value in capabilities.items() if value is True and k.startswith(CPU_FEATURES)),
        freed_memory="kept" if gives_back is None else f"given back to the system, because {gives_back}",
        backends={name: backend.name for name, backend in backends.items()}, gpu_backends=_gpu_backends(),
        warnings=warnings,
    )  # fmt: skip


def _reasons(op: str, device: torch.device) -> str:
    """The reasons why faster implementations of an op are not used on this device; empty if there is no faster one."""
    reasons = [
        f"{backend.name}: {reason}"
        for backend in all_ops()[op].backends
        if backend.device in (None, device.type) and (reason := backend.why_not())
    ]
    return f" ({'; '.join(reasons)})" if reasons else ""


def _gpu_backends() -> dict[str, str]:
    """The preferred GPU implementation of each op that has one, and the reason if this machine does not use it."""
    preferred: dict[str, str] = {}
    for name, op in all_ops().items():
        if backend := next((backend for backend in op.backends if backend.device == "cuda"), None):
            reason = backend.why_not()
            preferred[name] = f"{backend.name}, not used here: {reason}" if reason else backend.name
    return preferred


def installed_version(package: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def device_name(device: torch.device) -> str:
    """The kind of a device, and the device's name if the system gives one."""
    if device.type == "cuda":
        return f"cuda ({torch.cuda.device_count()} x {torch.cuda.get_device_name()})"
    return device.type if device.type != "cpu" else f"cpu ({cpu_name()})"


def cpu_name() -> str:
    """The processor's name, as the operating system gives it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def why_not() -> str | None:
    """The reason why this process returns freed memory to the system; None if it can keep the memory."""
    if os.environ.get(VARIABLE) == "system":
        return f"{VARIABLE}=system is set"
    if not sys.platform.startswith("linux") or platform.libc_ver()[0] != "glibc":
        return "the allocator is not glibc's"
    return None


def keep_freed_memory() -> None:
    """Let glibc keep up to 2 GB of freed memory, in blocks of up to 1 GB each, unless `why_not` returns a reason.

    By default glibc returns the memory of every tensor above 32 MB to the system when the tensor is freed. Each page of
    the next tensor then costs a page fault, which makes a training step up to 1.7 times as long. The command line calls
    this function; a program that imports multilin keeps its own settings.
    """
    if why_not() is None:
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)
