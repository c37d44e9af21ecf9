"""The files in which numba keeps compiled kernels."""

from collections import Counter
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch

from multilin.ops.int8 import cpu
from multilin.ops.kernels import cpu_launch as launch
from multilin.ops.tile_norm import tile_norm


def fill(shift: int, x: Any) -> None:
    for i in numba.prange(x.size):
        x[i] = shift


def test_processes_that_compile_for_different_types_share_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numba changes the index of its files without a lock, so an index must have one entry only."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(launch, "_compiled", launch._compiled.__wrapped__)
    for dtype in (torch.float32, torch.bfloat16):
        tile_norm(torch.ones(2, 8, dtype=dtype))
    monkeypatch.setattr(cpu, "fill", fill, raising=False)
    for shift, bits in ((0, np.int32), (16, np.int16)):
        cpu.compiled("fill", shift)(shift, np.zeros(3, bits))
    indices = [path.name.removesuffix(".nbi") for path in tmp_path.rglob("*.nbi")]
    entries = Counter(path.name.rsplit(".", 2)[0] for path in tmp_path.rglob("*.nbc"))
    assert len(indices) == 4
    assert entries == Counter(indices)
