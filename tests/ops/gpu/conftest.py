"""Where Triton's kernels are tested: small shapes anywhere, large ones (marked gpu) on a card only."""

import pytest
import torch

from multilin.ops.kernels import is_interpreted


@pytest.fixture
def device() -> torch.device:
    """Where kernels run: compiled on a card; else on the CPU, interpreted."""
    pytest.importorskip("triton")
    return torch.device("cpu" if is_interpreted() else "cuda")
