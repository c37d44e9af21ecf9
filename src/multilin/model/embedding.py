"""The model's first stage: token and position embeddings, and where every token stands in its text."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from multilin.errors import InputError
from multilin.layers.base import Layout
from multilin.model.config import MultilinConfig


class EmbeddingState(NamedTuple):
    """num_read_B: tokens of its text each row has read; document_B: the document they belong to. Both int64."""

    num_read_B: Tensor
    document_B: Tensor


class TokenEmbedding(nn.Module):
    """x_t = token embedding + embedding of the position, if positions are learned; dropout in training."""

    def __init__(self, config: MultilinConfig) -> None:
        super().__init__()
        self.limit = config.n_positions
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = None
        if config.positions == "learned":
            self.positions = nn.Embedding(int(config.n_positions or 0), config.hidden_size)
        self.dropout = nn.Dropout(config.embedding_dropout)

    def forward(self, input_ids: Tensor, layout: Layout) -> Tensor:
        """(B, T) ids to (B, T, D)."""
        x_BTD = self.tokens(input_ids)
        if self.positions is not None:
            x_BTD = x_BTD + self.positions(layout.positions_BT.clamp(min=0))
        result: Tensor = self.dropout(x_BTD)
        return result

    def lay_out(
        self,
        input_ids: Tensor,
        state: EmbeddingState | None,
        attention_mask: Tensor | None,
        document_ids: Tensor | None,
        position_ids: Tensor | None,
        needs_state: bool,
    ) -> tuple[Layout, EmbeddingState | None]:
        """Positions, text starts and padding of these tokens, and the state after them.

        Args:
            input_ids: (B, T).
            state: of the tokens before.
            attention_mask: (B, >= T) 0 where there is padding; the last T columns belong to these tokens.
            document_ids: (B, T) number of each token's document; a change begins a new text.
            position_ids: (B, T) or (1, T) positions to use instead of counting.
            needs_state: whether the caller will read on.

        Raises:
            InputError: a text longer than n_positions, a mask of another shape, or padding between two parts of a text.
        """
        num_batch, num_time = input_ids.shape
        padding_BT = _padding(attention_mask, num_batch, num_time)
        num_read_B = torch.zeros_like(input_ids[:, 0]) if state is None else state.num_read_B
        starts_BT = None if document_ids is None else _starts(document_ids, state)

        ones_BT = torch.ones_like(input_ids) if padding_BT is None else (~padding_BT).long()
        positions_BT = num_read_B[:, None] + ones_BT.cumsum(dim=1) - 1
        if starts_BT is not None:
            positions_BT = positions_BT - torch.where(starts_BT, positions_BT, 0).cummax(dim=1).values
        if position_ids is not None:
            positions_BT = position_ids.expand(num_batch, num_time)
        if not torch.compiler.is_compiling():
            self._check(positions_BT, padding_BT, state)
        if needs_state:
            document_B = torch.zeros_like(num_read_B) if document_ids is None else document_ids[:, -1]
            state = EmbeddingState(positions_BT[:, -1] + 1, document_B)
        return Layout(positions_BT, starts_BT, padding_BT, needs_state), state if needs_state else None

    def _check(self, positions_BT: Tensor, padding_BT: Tensor | None, state: EmbeddingState | None) -> None:
        may_be_long = state is not None or positions_BT.shape[1] > (self.limit or 0)
        if self.limit is not None and may_be_long and (length := int(positions_BT.max()) + 1) > self.limit:
            raise InputError(
                f"n_positions: the text has {length} tokens, but this model reads at most {self.limit} (n_positions)"
            )
        if state is not None and padding_BT is not None and positions_BT.shape[1] > 1:
            torn_B = padding_BT[:, 0] & (state.num_read_B > 0)
            if torn_B.any():
                row = int(torn_B.nonzero()[0, 0])
                raise InputError(
                    f"attention_mask: row {row} has read {int(state.num_read_B[row])} tokens and goes on with padding; "
                    "continue rows of different lengths one by one, or pad them on the right"
                )


def _padding(attention_mask: Tensor | None, num_batch: int, num_time: int) -> Tensor | None:
    if attention_mask is None:
        return None
    if attention_mask.ndim != 2 or attention_mask.shape[0] != num_batch or attention_mask.shape[1] < num_time:
        raise InputError(
            f"attention_mask: shape {tuple(attention_mask.shape)} given, but it must be ({num_batch}, {num_time})"
        )
    return attention_mask[:, -num_time:] == 0


def _starts(document_ids: Tensor, state: EmbeddingState | None) -> Tensor:
    """True where the document changes; the first token goes on with the state's document if it is the same."""
    before_B1 = document_ids[:, :1] if state is None else state.document_B[:, None]
    return document_ids != torch.cat([before_B1, document_ids[:, :-1]], dim=1)


def documents_from_lengths(cu_seqlens: Tensor, num_batch: int, num_time: int) -> Tensor:
    """Document numbers (B, T) from the cumulative lengths of the texts packed into the rows laid end to end.

    cu_seqlens: (N + 1,) int, 0 first, B * T last; every row must begin a text.
    """
    if cu_seqlens[0] != 0 or cu_seqlens[-1] != num_batch * num_time:
        raise InputError(f"cu_seqlens: must run from 0 to the number of tokens, {num_batch * num_time}")
    ends = cu_seqlens[1:].to(torch.int64)
    flat = torch.searchsorted(ends, torch.arange(num_batch * num_time, device=cu_seqlens.device), right=True)
    return flat.view(num_batch, num_time)
