"""The recurrence of minGRU and its weights, as equations."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def linear_recurrence(inputs_BT2D: Tensor, before_BD: Tensor, starts_BT: Tensor | None) -> tuple[Tensor, Tensor]:
    """See `multilin.ops.linear_recurrence`; return all hidden states, and the last in the dtype of `before_BD`."""
    hidden_BD, all_hidden = before_BD, []
    for t, pair_B2D in enumerate(inputs_BT2D.to(before_BD.dtype).unbind(1)):
        gate_BD, candidate_BD = pair_B2D.unbind(1)
        if starts_BT is not None:
            hidden_BD = hidden_BD.masked_fill(starts_BT[:, t, None], 0.0)
        hidden_BD = torch.sigmoid(-gate_BD) * hidden_BD + torch.sigmoid(gate_BD) * make_positive(candidate_BD)
        all_hidden.append(hidden_BD)
    return torch.stack(all_hidden, dim=1).to(inputs_BT2D.dtype), hidden_BD


def make_positive(u: Tensor) -> Tensor:
    """g(u) = u + 0.5 for u >= 0, else sigmoid(u): continuous, and above 0."""
    return torch.where(u >= 0, u + 0.5, torch.sigmoid(u))


def linear_recurrence_weights(
    inputs: Float[Tensor, "B T 2 D"],
    *,
    starts: Bool[Tensor, "B T"] | None = None,
    padding: Bool[Tensor, "B T"] | None = None,
) -> tuple[Float[Tensor, "B T T"], Float[Tensor, "B T"]]:
    """The weights in h_t of each g(u_s), and of the 0 before the text, averaged over the channels; they sum to 1.

    Cost: O(B D T^2) time, O(B T (T + D)) memory.
    """
    gates_BTD = inputs[:, :, 0].to(torch.promote_types(inputs.dtype, torch.float32))
    if padding is not None:
        gates_BTD = gates_BTD.masked_fill(padding[..., None], -torch.inf)
    num_batch, num_time, width = gates_BTD.shape
    weights_BSD, rows = gates_BTD.new_zeros(num_batch, num_time, width), []
    for t in range(num_time):
        weights_BSD = weights_BSD * torch.sigmoid(-gates_BTD[:, t, None])
        if starts is not None:
            weights_BSD = weights_BSD.masked_fill(starts[:, t, None, None], 0.0)
        weights_BSD[:, t] = torch.sigmoid(gates_BTD[:, t])
        rows.append(weights_BSD.mean(dim=2))
    weights_BTS = torch.stack(rows, dim=1) if rows else weights_BSD[:, :, :0]
    return weights_BTS, 1 - weights_BTS.sum(dim=2)
