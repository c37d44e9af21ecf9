"""Muon: PyTorch's own for the matrices of layers, AdamW for everything else, as one optimizer."""

from typing import Any

import torch
from torch import Tensor

BETAS = (0.9, 0.95)  # AdamW's averages


class Muon(torch.optim.Optimizer):
    """`torch.optim.Muon` for groups with `matrices` true, `torch.optim.AdamW` for the others.

    With the gradient G of an (A, B) matrix W, an average M that starts at 0, and O(X) the matrix nearest to X that has
    orthonormal rows or columns, approximated by five Newton-Schulz iterations:

        M <- 0.95 M + 0.05 G
        W <- (1 - lr * weight_decay) W - 0.2 lr sqrt(max(A, B)) O(0.95 M + 0.05 G)

    The factor gives updates the root mean square that AdamW's have, so that both parts take one learning rate. State:
    one number per number of a matrix, two per number of anything else.

    Args:
        params: parameter groups; `matrices` of a group says which part changes its tensors.
        lr: learning rate of both.
        weight_decay: decoupled decay, times the learning rate.

    Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; the factor is that of Liu et
    al. 2025, "Muon is Scalable for LLM Training".
    """

    def __init__(self, params: Any, lr: float | Tensor = 5e-3, *, weight_decay: float = 0.1) -> None:
        groups = list(params)
        parts: dict[bool, tuple[Any, dict[str, Any]]] = {
            True: (torch.optim.Muon, {"adjust_lr_fn": "match_rms_adamw"}),
            False: (torch.optim.AdamW, {"betas": BETAS, "fused": True}),
        }
        self._parts: dict[bool, torch.optim.Optimizer] = {}
        for is_matrix, (kind, settings) in parts.items():
            # An optimizer fills its settings into the groups it is given, which are the very ones kept below.
            if own := [group for group in groups if group["matrices"] is is_matrix]:
                self._parts[is_matrix] = kind(own, lr=lr, weight_decay=weight_decay, **settings)
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Change every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for is_matrix, part in self._parts.items():
            # Both are new objects after a state was loaded.
            part.param_groups = [group for group in self.param_groups if group["matrices"] is is_matrix]
            part.state = self.state
            part.step()
        return loss
