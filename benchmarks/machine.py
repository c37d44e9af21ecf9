"""What a measurement depends on: the machine, the versions, the commit."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

_PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "numba", "triton")


def processor() -> str:
    """The processor's name as the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def accelerator() -> str:
    """The first GPU's name, or `none`."""
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"


def versions() -> dict[str, str]:
    """Python and the installed packages that decide about speed."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def commit() -> str:
    """The git commit of this checkout, with `+ changes` where files differ from it."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + (" + changes" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def description() -> dict[str, str]:
    """All of it: machine, versions and commit."""
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    system = f"{platform.system()} {platform.release()}"
    return {
        "machine": f"{processor()}, {cores()} cores{load}; {system}; GPU: {accelerator()}",
        "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
        "commit": commit(),
    }


def main(argv: list[str] | None = None) -> None:
    """Print it."""
    for name, value in description().items():
        print(f"{name:9}{value}")


if __name__ == "__main__":
    main()
