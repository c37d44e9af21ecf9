"""Matrix moment, the optimizer of TScale, which has one second moment per matrix or row, not per element."""

from typing import Any

import torch
from torch import Tensor

from multilin.training.optimizers.base import NormalizingOptimizer, as_rows, local, norms, row_norms, row_shape

NOW, MOMENTUM = 0.2, 0.8  # weights of this step's direction and of the average in an update


class MatrixMoment(NormalizingOptimizer):
    """Momentum of gradients that are divided by their root mean square over a matrix (or row) and over time.

    Step i = 0, 1, ... for a matrix p, or a row p, with gradient g. Each row has its own D; all rows share W:

        b  = 1 - 0.5 / sqrt(1 + i)
        D <- b D + mean(g^2)       W <- b W + 1       n = g / sqrt(D / W), 0 where mean(g^2) = 0
        m <- b m + (1 - b) n
        p <- (1 - lr * weight_decay) p - lr (0.2 n + 0.8 m)

    A row with zero gradient decays and still moves along its momentum. The state is m, one number per element (AdamW
    has two); D, one number per matrix or row; W and i, one number per matrix. Parameters must be float32 or better. The
    root mean square of a gradient must lie between about 1e-19 and 1e19, so that float32 can hold squares.

    Args:
        params: parameters or parameter groups; `rows` of a group says whether it is updated by rows.
        lr: root mean square of the update if its direction is the same in all steps.
        weight_decay: decoupled weight decay, multiplied by the learning rate; TScale's source calls it l2.
        rows: value of `rows` for groups that do not give it.

    Source: TScale (Foreseerr).
    """

    wide_names = ("second_moment", "weight", "num_steps")
    state_names = ("momentum", *wide_names)

    def __init__(
        self, params: Any, lr: float | Tensor = 0.01, *, weight_decay: float = 0.0, rows: bool = False
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "rows": rows})

    def update_whole(self, parameters: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> None:
        """See the class."""
        states = [self._state(parameter) for parameter in parameters]
        roots = [max(parameter.numel(), 1) ** 0.5 for parameter in parameters]
        mean_square = torch.stack(torch._foreach_div(norms(gradients), roots)).square()
        second_moment, weight, num_steps = (
            torch.stack([state[name] for state in states]) for name in ("second_moment", "weight", "num_steps")
        )
        keep, factor = _advance(second_moment, weight, num_steps, mean_square)
        for name, values in (("second_moment", second_moment), ("weight", weight), ("num_steps", num_steps)):
            torch._foreach_copy_([state[name] for state in states], values.unbind())

        dtype, lr = parameters[0].dtype, group["lr"]
        momenta = local([state["momentum"] for state in states])
        parameters, gradients = local(parameters), local(gradients)
        torch._foreach_mul_(momenta, keep.to(dtype).unbind())
        torch._foreach_addcmul_(momenta, gradients, ((1 - keep) * factor).to(dtype).unbind())
        torch._foreach_addcmul_(parameters, gradients, (-NOW * lr * factor).to(dtype).unbind())
        torch._foreach_addcmul_(parameters, momenta, (-MOMENTUM * lr * torch.ones_like(factor)).to(dtype).unbind())

    def update_rows(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """See the class."""
        state = self._state(parameter, by_row=True)
        rows, now, momentum = as_rows(parameter), as_rows(gradient), as_rows(state["momentum"])
        mean_square = row_norms(now).square() / max(now.shape[1], 1)
        (second_moment,) = local([state["second_moment"]])
        keep, factor = _advance(second_moment, state["weight"], state["num_steps"], mean_square)

        dtype, lr = parameter.dtype, group["lr"]
        momentum.mul_(keep.to(dtype)).addcmul_(now, ((1 - keep) * factor).to(dtype))
        rows.addcmul_(now, (-NOW * lr * factor).to(dtype))
        rows.addcmul_(momentum, (-MOMENTUM * lr * torch.ones_like(keep)).to(dtype))

    def _state(self, parameter: Tensor, *, by_row: bool = False) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            few: dict[str, Any] = {"dtype": dtype, "device": parameter.device}
            state["momentum"] = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
            # One number per row, divided among devices as the rows are.
            first = parameter.detach().reshape(row_shape(parameter))[:, :1] if by_row else torch.zeros((), **few)
            state["second_moment"] = torch.zeros_like(first, dtype=dtype, memory_format=torch.contiguous_format)
            state["weight"], state["num_steps"] = torch.zeros((), **few), torch.zeros((), **few)
        return state


def beta(step: Tensor) -> Tensor:
    """1 - 0.5 / sqrt(1 + i), the weight of the past in the averages after i earlier steps."""
    return 1 - 0.5 * (1 + step).rsqrt()


def _advance(second_moment: Tensor, weight: Tensor, step: Tensor, mean_square: Tensor) -> tuple[Tensor, Tensor]:
    """Update the statistics in place; return b, and 1 / sqrt(D / W), or 0 where the gradient is zero."""
    keep = beta(step)
    step.add_(1)
    weight.mul_(keep).add_(1)
    second_moment.mul_(keep).add_(mean_square)
    zero = mean_square == 0
    # Roots first: the quotient of squares can be too large for float32 when the quotient of roots is not.
    return keep, (weight.sqrt() / second_moment.masked_fill(zero, 1.0).sqrt()).masked_fill(zero, 0.0)
