"""The files in which numba keeps compiled kernels."""

from collections import Counter
from pathlib import Path

import numba
import pytest
import torch

from multilin.ops.int8.cpu import CpuSteps
from multilin.ops.kernels import cpu_launch as launch
from multilin.ops.tile_norm import tile_norm


def test_processes_that_compile_for_different_types_share_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numba changes the index of its files without a lock, so an index must have one entry only."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(launch, "_compiled", launch._compiled.__wrapped__)
    for dtype in (torch.float32, torch.bfloat16):
        tile_norm(torch.ones(2, 8, dtype=dtype))
        CpuSteps.round_rows(torch.ones(2, 8, dtype=dtype))
    indices = [path.name.removesuffix(".nbi") for path in tmp_path.rglob("*.nbi")]
    entries = Counter(path.name.rsplit(".", 2)[0] for path in tmp_path.rglob("*.nbc"))
    assert len(indices) == 4
    assert entries == Counter(indices)
