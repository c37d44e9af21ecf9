"""The kernels of matrix products and attention compile for a Hopper card, which takes none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_every_kernel_compiles_for_a_hopper_card() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = [sys.executable, "-W", "ignore", "-m", "tests.ops.gpu.compiling", "tests.ops.gpu.product_calls"]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
