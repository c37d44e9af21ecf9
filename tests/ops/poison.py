"""Memory that nobody wrote to is nan, so that reading it, or leaving it as a result, shows."""

import pytest
import torch
from torch import Tensor


def poison_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test ends, torch.empty gives nan."""
    empty = torch.empty

    def poison(*arguments: object, **options: object) -> Tensor:
        tensor = empty(*arguments, **options)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", poison)
