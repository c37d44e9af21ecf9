"""The kernels of all ops but prefix_softmax compile for a Hopper card, which takes none."""

import os

import pytest

from tests.processes import PYTHON, run


@pytest.mark.slow
def test_every_kernel_compiles_for_a_hopper_card() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run([*PYTHON, "-m", "tests.ops.gpu.compiling", "tests.ops.gpu.other_calls"], environment=environment)
