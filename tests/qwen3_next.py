"""transformers' Qwen3-Next, whose linear layer is Gated DeltaNet, to compare with in float64."""

from types import ModuleType
from typing import Any

import pytest
import torch
from transformers.models.qwen3_next import modeling_qwen3_next


class _WithoutFloat32(ModuleType):
    """PyTorch, but its float32 is float64."""

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name == "float32" else getattr(torch, name)


def in_float64(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Its module, where everything that it rounds to float32 on the way (decays, the rule, norms) is in float64."""
    monkeypatch.setattr(modeling_qwen3_next, "torch", _WithoutFloat32("torch"))
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    return modeling_qwen3_next
