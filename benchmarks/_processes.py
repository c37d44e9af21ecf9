"""Benchmarks of several processes that train together."""

import subprocess
import sys
import tempfile


def start_together(module: str, number: int, argv: list[str]) -> None:
    """Run a benchmark's module in so many processes of torchrun, which get `--folder` with a temporary one to share.

    Raises:
        CalledProcessError: one of them failed.
    """
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(number), "-m", module]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", *torchrun, *argv, "--folder", folder], check=True)
