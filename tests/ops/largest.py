"""How large a computation's largest tensor is, whoever makes it."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LargestTensor(TorchDispatchMode):
    """Inside this context, `numbers` is the most numbers that one new tensor held."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            # A view holds nothing; an expanded one has more numbers than memory.
            self.numbers = max(self.numbers, result.untyped_storage().nbytes() // result.element_size())
        return result
