"""What this machine offers: versions, device, processor, and the implementation that each op will use."""

import importlib.metadata
import importlib.util
import platform
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from multilin import allocator
from multilin.ops.dispatch import all_ops
from multilin.threads import available_cores, contention
from multilin.training.precision import resolve_precision

PACKAGES = (
    "multilin",
    "torch",
    "transformers",
    "tokenizers",
    "datasets",
    "accelerate",
    "safetensors",
    "numba",
    "triton",
)
# Beginnings of the names of instruction sets that decide how fast matrix products are, in bf16 and int8 above all.
CPU_FEATURES = ("avx2", "avx512_f", "avx512_bf16", "avx512_vnni", "avx10", "amx", "sve", "bf16", "i8mm", "dotprod")
OPTIONAL = {"tensorboard": "TensorBoard event files of a run: pip install 'multilin[tensorboard]'"}


@dataclass(frozen=True)
class Checkup:
    """The findings.

    versions: package to version, or None where it is not installed.
    device: where models run; threads: of PyTorch on the CPU; cores: this process may use.
    precision: what `precision: auto` trains in here.
    cpu_features: the processor's instruction sets among CPU_FEATURES.
    freed_memory: what the command line does with it, see multilin.allocator.
    backends: op to the name of its implementation on the device.
    gpu_backends: op to its implementation on a GPU, and the reason against it; without ops that have none.
    optional: package that is not needed to whether it is installed.
    warnings: sentences about what will be slow.
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
    optional: dict[str, bool]
    warnings: list[str] = field(default_factory=list)


def examine() -> Checkup:
    """Look at this machine."""
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    cores = available_cores()
    backends = {name: op.backend_for(device) for name, op in all_ops().items()}
    gives_back = allocator.why_not()
    warnings = [
        f"{name} uses its {backend.name}, which is slow{_reasons(name, device)}"
        for name, backend in backends.items()
        if backend.is_slow or _reasons(name, device)
    ]
    if torch.get_num_threads() < cores:
        warnings.append(f"PyTorch uses {torch.get_num_threads()} of {cores} cores (OMP_NUM_THREADS)")
    if sentence := contention():
        warnings.append(sentence)
    return Checkup(
        versions={name: _version(name) for name in PACKAGES},
        python=platform.python_version(),
        platform=platform.platform(),
        device=_device_name(device),
        threads=torch.get_num_threads(),
        cores=cores,
        precision=resolve_precision("auto"),
        cpu_features=_cpu_features(),
        freed_memory="kept" if gives_back is None else f"given back to the system, as {gives_back}",
        backends={name: backend.name for name, backend in backends.items()},
        gpu_backends=_gpu_backends(),
        optional={name: importlib.util.find_spec(name) is not None for name in OPTIONAL},
        warnings=warnings,
    )


def _reasons(op: str, device: torch.device) -> str:
    """Why implementations of an op that would be preferred on this device are not used; empty if there are none."""
    reasons = [
        f"{backend.name}: {reason}"
        for backend in all_ops()[op].backends
        if backend.device in (None, device.type) and (reason := backend.why_not())
    ]
    return f" ({'; '.join(reasons)})" if reasons else ""


def _gpu_backends() -> dict[str, str]:
    """The preferred implementation of each op that has one of its own for GPUs."""
    found: dict[str, str] = {}
    for name, op in all_ops().items():
        for backend in op.backends:
            if backend.device == "cuda":
                reason = backend.why_not()
                found.setdefault(name, f"{backend.name}, not here: {reason}" if reason else backend.name)
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"cuda ({torch.cuda.device_count()} x {torch.cuda.get_device_name()})"
    return device.type if device.type != "cpu" else f"cpu ({_cpu_name()})"


def _cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _cpu_features() -> list[str]:
    found = torch.cpu.get_capabilities()
    return sorted(name for name, value in found.items() if value is True and name.startswith(CPU_FEATURES))


def print_checkup(checkup: Checkup, console: Console) -> None:
    """Show the findings as a table, warnings last."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("python", f"{checkup.python} on {checkup.platform}")
    for name, version in checkup.versions.items():
        table.add_row(name, version or "not installed")
    table.add_row("device", checkup.device)
    table.add_row("threads", f"{checkup.threads} on {checkup.cores} cores")
    table.add_row("processor has", " ".join(checkup.cpu_features))
    table.add_row("precision auto is", checkup.precision)
    table.add_row("freed memory", checkup.freed_memory)
    for name, backend in checkup.backends.items():
        table.add_row(f"op {name}", backend)
    for name, backend in checkup.gpu_backends.items():
        table.add_row(f"op {name} on a GPU", backend)
    for name, is_installed in checkup.optional.items():
        table.add_row(f"optional {name}", "installed" if is_installed else f"not installed ({OPTIONAL[name]})")
    console.print(table, soft_wrap=True)
    for warning in checkup.warnings:
        console.print(f"warning: {warning}", style="yellow", soft_wrap=True)
    if not checkup.warnings:
        console.print("no warnings", style="green")
