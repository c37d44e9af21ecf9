"""Memory that nobody wrote to is nan, so that reading it, or leaving it as a result, shows."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor


def poison_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test ends, what makes empty tensors gives nan."""

    def poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def poison(*arguments: object, **options: object) -> Tensor:
            tensor = make(*arguments, **options)
            return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

        return poison

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
