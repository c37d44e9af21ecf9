"""What the modules of a model return while it runs."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


def watch(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """A dictionary that fills with the output of each module, the first part of a pair, under the module's name."""
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            seen[name] = output[0] if isinstance(output, tuple) else output

        return hook

    for name, module in modules.items():
        module.register_forward_hook(keep(name))
    return seen
