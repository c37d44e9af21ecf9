"""What counts as an export."""

import pytest
import torch

from multilin.ops.kernels import is_exported


@pytest.mark.parametrize("is_exporting", [True, False])
@pytest.mark.parametrize("is_dynamo", [True, False])
def test_a_call_that_dynamo_traces_is_no_export(
    is_exporting: bool, is_dynamo: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch 2.11 answers that it exports whenever Dynamo traces."""
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: is_exporting)
    monkeypatch.setattr(torch.compiler, "is_dynamo_compiling", lambda: is_dynamo)
    assert is_exported() == (is_exporting and not is_dynamo)
