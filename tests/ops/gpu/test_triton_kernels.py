"""What Triton's kernels share, and how dispatch comes to them."""

import os
import warnings

import pytest
import torch

from multilin.ops import kernels
from multilin.ops.dispatch import Backend, Op, all_ops
from tests.processes import PYTHON, run

CPU = torch.device("cpu")


@pytest.mark.parametrize("installed", [True, False])
def test_importing_the_ops_imports_no_kernels(installed: bool) -> None:
    """PyTorch's compiler may import triton itself, so what is looked for are our files that do."""
    program = f"""
import sys
if not {installed}:
    sys.modules["triton"] = None  # as where it is not installed
from multilin.ops import kernels
from multilin.ops.dispatch import all_ops
all_ops()
assert "multilin.ops.kernels.gpu_launch" not in sys.modules
assert {installed} or kernels.why_no_triton() == "triton is not installed"
"""
    run([*PYTHON, "-c", program])


def test_where_there_is_no_card_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_HAS_TRITON", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert kernels.why_no_triton() == "PyTorch sees no CUDA device"


def test_an_old_card_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_HAS_TRITON", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "7.5" in str(kernels.why_no_triton())


def test_no_kernel_for_gpus_is_taken_for_tensors_of_the_cpu() -> None:
    for op in all_ops().values():
        assert op.backend_for(CPU).device in (None, "cpu")


def _op_that_refuses_odd_widths(name: str) -> Op:
    def refuses(x: torch.Tensor) -> str | None:
        return f"the width is {x.shape[-1]}, and it takes even ones" if x.shape[-1] % 2 else None

    return Op(name, [Backend("fast", torch.sin, refuses=refuses), Backend("slow", torch.sin)])


def test_a_refused_call_goes_to_the_next_backend_with_one_warning() -> None:
    op = _op_that_refuses_odd_widths("refusing_op")
    assert op.backend_for(CPU, torch.float32, (torch.zeros(2),)).name == "fast"
    with pytest.warns(UserWarning, match="refusing_op: fast does not take this call, as the width is 3.*slow runs"):
        assert op.backend_for(CPU, torch.float32, (torch.zeros(3),)).name == "slow"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert op.backend_for(CPU, torch.float32, (torch.zeros(3),)).name == "slow"


def test_a_refusal_is_told_while_a_graph_is_traced() -> None:
    op = _op_that_refuses_odd_widths("refusing_compiled_op")

    @torch.compile(backend="eager", fullgraph=True)
    def double(x: torch.Tensor) -> torch.Tensor:
        return op.backend_for(x.device, x.dtype, (x,)).compute(x) * 2

    with pytest.warns(UserWarning, match="refusing_compiled_op: fast does not take this call"):
        torch.testing.assert_close(double(torch.ones(3)), 2 * torch.ones(3).sin())


@pytest.mark.slow
def test_every_kernel_compiles_for_a_hopper_card() -> None:
    """Which takes no card."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run([*PYTHON, "-m", "tests.ops.gpu.compiling", "tests.ops.gpu.kernel_calls"], environment=environment)
