"""The machine, the versions and the commit of a measurement."""

import os
import platform
import subprocess
from pathlib import Path

import torch

from multilin.analysis.machine import cpu_name, installed_version
from multilin.ops.threads import available_cores

_PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "numba", "triton")  # that affect speed


def accelerator() -> str:
    """The first GPU's name, or `none`."""
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"


def commit() -> str:
    """The git commit of this checkout, with `+ changes` if files differ from it."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + (" + changes" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def description() -> dict[str, str]:
    """Machine, versions and commit, as text."""
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    versions = {"python": platform.python_version()} | {name: installed_version(name) for name in _PACKAGES}
    system = f"{platform.system()} {platform.release()}"
    return {
        "machine": f"{cpu_name()}, {available_cores()} cores{load}; {system}; GPU: {accelerator()}",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
        "commit": commit(),
    }
