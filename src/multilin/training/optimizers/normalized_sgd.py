"""Normalised SGD, the optimizer of 3Lin, which uses the direction of a gradient but not the gradient's norm."""

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from multilin.errors import InputError
from multilin.training.optimizers.base import NormalizingOptimizer, as_rows, inverse, local, norms, row_norms

RowOrder = Literal["normalize_then_average", "average_then_normalize"]
ROW_ORDERS: tuple[RowOrder, ...] = get_args(RowOrder)


class NormalizedSGD(NormalizingOptimizer):
    """Gradient descent with every gradient scaled to norm 1, and a running average over time for rows.

    For a tensor W with gradient G that is updated as a whole, with N(G) = G / ||G|| (Frobenius norm) and N(0) = 0:

        W <- (1 - lr * weight_decay) W - lr N(G)

    For each row W_r, with an average A_r that starts at 0 and b = row_average, in one of two orders:

        normalize_then_average:  A_r <- b A_r + (1 - b) N(G_r)     W_r <- (1 - lr * weight_decay) W_r - lr A_r
        average_then_normalize:  A_r <- b A_r + (1 - b) G_r        W_r <- (1 - lr * weight_decay) W_r - lr N(A_r)

    Norms are computed from squares in float32. A norm below about 1e-22 counts as 0; a norm above 1e19 counts as
    infinite, so the parameter does not move. A row with zero gradient still moves along its average. The state is one
    number per element of tensors of rows. Whole tensors have only a count of steps, since PyTorch's distributed
    checkpoints need a state of every parameter.

    Args:
        params: parameters or parameter groups; `rows` of a group says whether it is updated by rows.
        lr: norm of the update of a tensor, or of a row.
        weight_decay: decoupled weight decay, multiplied by the learning rate.
        row_average: weight of the past in the average of rows, at least 0 and below 1.
        row_order: whether rows are first normalised or first averaged.
        rows: value of `rows` for groups that do not give it.

    Source: 3Lin, the triple-linear transformer.
    """

    wide_names = state_names = ("num_steps",)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 0.1,
        *,
        weight_decay: float = 0.0,
        row_average: float = 0.9,
        row_order: RowOrder = "normalize_then_average",
        rows: bool = False,
    ) -> None:
        if not 0 <= row_average < 1:
            raise InputError(f"row_average: {row_average} given, but it must be at least 0 and below 1")
        if row_order not in ROW_ORDERS:
            raise InputError(f"row_order: {row_order!r} given, but it must be {' or '.join(ROW_ORDERS)}")
        averaging = {"row_average": row_average, "row_order": row_order}
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, **averaging, "rows": rows})

    def update_whole(self, parameters: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> None:
        """See the class."""
        torch._foreach_add_([self._state(parameter)["num_steps"] for parameter in parameters], 1)
        factors = (-group["lr"] * inverse(torch.stack(norms(gradients)))).to(parameters[0].dtype)
        torch._foreach_addcmul_(local(parameters), local(gradients), factors.unbind())

    def update_rows(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """See the class."""
        state = self._state(parameter)
        state["num_steps"].add_(1)
        if "row_average" not in state:
            state["row_average"] = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
        average, rows, now = as_rows(state["row_average"]), as_rows(parameter), as_rows(gradient)
        keep = group["row_average"]
        average.mul_(keep)
        if group["row_order"] == "normalize_then_average":
            average.addcmul_(now, ((1 - keep) * inverse(row_norms(now))).to(now.dtype))
            rows.addcmul_(average, -group["lr"] * torch.ones((), dtype=rows.dtype, device=rows.device))
        else:
            average.add_(now, alpha=1 - keep)
            rows.addcmul_(average, (-group["lr"] * inverse(row_norms(average))).to(rows.dtype))

    def _state(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            # Shape (1,): PyTorch takes the device of a saved state from tensors with at least one dimension.
            state["num_steps"] = torch.zeros(1, dtype=torch.float32, device=parameter.device)
        return state
