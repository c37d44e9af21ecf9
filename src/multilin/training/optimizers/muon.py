"""Muon for the matrices of layers, AdamW for everything else, as one optimizer."""

from typing import Any

import torch
from torch import Tensor

from multilin.errors import InputError
from multilin.training.optimizers.base import CheckedOptimizer
from multilin.training.precision import has_bf16

BETAS = (0.9, 0.95)  # AdamW's averages
MOMENTUM = 0.95
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # factors of X, (X X') X and (X X')^2 X in each iteration
ITERATIONS = 5


class Muon(CheckedOptimizer):
    """Muon for parameter groups whose `matrices` is true, `torch.optim.AdamW` for the other groups.

    W is an (A, B) matrix, G its gradient, and M an average that starts at 0. O(X) is the matrix nearest to X that has
    orthonormal rows or columns, approximated by five Newton-Schulz iterations. A step computes

        M <- 0.95 M + 0.05 G
        W <- (1 - lr * weight_decay) W - 0.2 lr sqrt(max(A, B)) O(0.95 M + 0.05 G)

    Due to the factor 0.2 sqrt(max(A, B)), the root mean square of updates is about as large as with AdamW, so one
    learning rate suits both. If the hardware multiplies bf16, the iterations equal `torch.optim.Muon` bit for bit. If
    not, the iterations use float32, since emulated bf16 products are tens of times slower. The state is one number per
    element of a matrix, two per element of any other tensor.

    Args:
        params: parameter groups; `matrices` of a group says whether Muon or AdamW updates its tensors.
        lr: learning rate of both Muon and AdamW.
        weight_decay: decoupled weight decay, multiplied by the learning rate.

    Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; the factor is from Liu et al.
    2025, "Muon is Scalable for LLM Training".
    """

    marks = ("matrices",)

    def __init__(self, params: Any, lr: float = 5e-3, *, weight_decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as in PyTorch.

        Raises:
            InputError: the group has no `matrices`, or is for Muon and has a tensor that is not a matrix.
        """
        if "matrices" not in param_group:
            raise InputError("params: a group lacks 'matrices'; set it to True for Muon or False for AdamW")
        super().add_param_group(param_group)
        added = self.param_groups[-1]
        if added["matrices"] and (others := [tuple(x.shape) for x in added["params"] if x.ndim != 2]):
            self.param_groups.pop()
            raise InputError(f"params: a tensor of shape {others[0]} given, but Muon changes only matrices")

    def update(self) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for matrix in group["params"] if group["matrices"] else ():
                if matrix.grad is not None:
                    self._move(matrix, group["lr"], group["weight_decay"])
        if others := [group for group in self.param_groups if not group["matrices"]]:
            # AdamW writes its other settings into these same groups, and its state into this optimizer's.
            adamw = torch.optim.AdamW(others, betas=BETAS, fused=True)
            adamw.state = self.state
            adamw.step()

    def _move(self, matrix: Tensor, lr: float, weight_decay: float) -> None:
        gradient = matrix.grad
        assert gradient is not None
        state = self.state[matrix]
        if not state:
            state["average"] = torch.zeros_like(gradient)
        average = state["average"].lerp_(gradient, 1 - MOMENTUM)
        dtype = torch.bfloat16 if has_bf16(matrix.device.type) else torch.float32
        update = orthogonalized(gradient.lerp(average, MOMENTUM).to(dtype))
        matrix.mul_(1 - lr * weight_decay).add_(update, alpha=-0.2 * lr * max(matrix.shape) ** 0.5)


def orthogonalized(x_AB: Tensor) -> Tensor:
    """O(X), in the dtype of X. The singular values of the result are between 0.7 and 1.2, not exactly 1."""
    if x_AB.shape[0] > x_AB.shape[1]:
        return orthogonalized(x_AB.T).T
    a, b, c = NEWTON_SCHULZ
    x_AB = x_AB / x_AB.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram_AA = x_AB @ x_AB.T
        x_AB = torch.addmm(x_AB, torch.addmm(gram_AA, gram_AA, gram_AA, beta=b, alpha=c), x_AB, beta=a)
    return x_AB
