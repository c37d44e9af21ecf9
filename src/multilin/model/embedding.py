"""The model's first stage: token and position embeddings, and the position of every token in its text."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from multilin.errors import InputError
from multilin.layers.base import Layout
from multilin.model.config import MultilinConfig
from multilin.model.match import Match, MatchEmbedding, Matches
from multilin.model.row_layout import Packing, document_starts
from multilin.ops.dispatch import can_read_values
from multilin.ops.shapes import kind_of
from multilin.settings import load_settings

HASH_FACTOR = 6364136223846793005  # Knuth's multiplier for numbers of 64 bits, which wrap around
HASH_MASK = 2**63 - 1


class EmbeddingState(NamedTuple):
    """What the embedding remembers of the tokens that each row has read.

    num_read_B: (B,) int64 number of tokens of the current document.
    document_B: (B,) int64 number of the current document in document_ids.
    hash_B: (B,) int64 hash of the token ids of the current document, see `hash_tokens`.
    match: the last tokens, where the longest match is searched; None in a model without it.
    """

    num_read_B: Tensor
    document_B: Tensor
    hash_B: Tensor
    match: Any = None


class TokenEmbedding(nn.Module):
    """x_t = token embedding, plus embeddings of the position and the longest match if the config has them; dropout."""

    def __init__(self, config: MultilinConfig) -> None:
        super().__init__()
        self.limit = config.n_positions
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = None
        if config.positions == "learned":
            self.positions = nn.Embedding(int(config.n_positions or 0), config.hidden_size)
        self.match = None
        if config.match is not None:
            search = load_settings(Match, config.match, "match")
            self.match = MatchEmbedding(config.vocab_size, config.hidden_size, search)
        self.dropout = nn.Dropout(config.embedding_dropout)

    def forward(self, tokens: Tensor, layout: Layout, matches: Matches | None = None) -> Tensor:
        """Map ids (B, T), or token embeddings (B, T, D), to (B, T, D); a model with `match` needs the matches."""
        x_BTD = self.embed_tokens(tokens) if tokens.ndim == 2 else tokens.to(self.embed_tokens.weight.dtype)
        if self.positions is not None:
            x_BTD = x_BTD + self.positions(layout.positions_BT.clamp(min=0))
        if self.match is not None:
            x_BTD = x_BTD + self.match(matches)
        return self.dropout(x_BTD)

    def lay_out(
        self,
        tokens: Tensor,
        state: EmbeddingState | None,
        mask: Tensor | None,
        packing: Packing,
        needs_state: bool,
    ) -> tuple[Layout, Matches | None, EmbeddingState | None]:
        """Find positions, document starts, padding and longest matches of these tokens, and the state after them.

        Args:
            tokens: (B, T) ids or (B, T, D) embeddings.
            state: state after the earlier tokens.
            mask: (B, T) bool, False for padding.
            packing: where documents begin, and positions to use instead of counting.
            needs_state: whether to return the next state.

        Raises:
            InputError: no rows, no tokens, a text longer than n_positions, or a tensor of another shape.
        """
        num_batch, num_time = tokens.shape[:2]
        if num_batch == 0:
            raise InputError("input_ids: no rows given, but at least one is needed")
        if num_time == 0:
            raise InputError("input_ids: no tokens given, but at least one is needed in each row")
        state_before = state or EmbeddingState(*(tokens.new_zeros(num_batch, dtype=torch.long) for _ in range(3)))
        if mask is None:
            padding_BT = None
            num_before_BT = state_before.num_read_B[:, None] + torch.arange(num_time, device=tokens.device)
            positions_BT = num_before_BT
        else:
            padding_BT, counts_BT = ~mask, mask.long()
            num_before_BT = state_before.num_read_B[:, None] + counts_BT.cumsum(dim=1) - counts_BT
            positions_BT = num_before_BT + counts_BT - 1
        starts_BT = document_starts(packing, padding_BT, num_before_BT, state_before.document_B)
        if packing.position_ids is not None:
            positions_BT = packing.position_ids.expand(num_batch, num_time).long()
        elif starts_BT is not None:
            positions_BT = positions_BT - torch.where(starts_BT, positions_BT, 0).cummax(dim=1).values
        if can_read_values(positions_BT):
            self._check_positions(positions_BT, padding_BT, state is None, packing)
        layout = Layout(positions_BT, starts_BT, padding_BT, needs_state)
        after = _state_after(tokens, layout, packing, state_before) if needs_state else None
        if self.match is None:
            return layout, None, after
        matches, found = self.match.look_up(tokens, state_before.match, layout)
        return layout, matches, None if after is None else after._replace(match=found)

    def _check_positions(
        self, positions_BT: Tensor, padding_BT: Tensor | None, is_start: bool, packing: Packing
    ) -> None:
        if packing.position_ids is not None:
            given_BT = positions_BT if padding_BT is None else positions_BT.masked_fill(padding_BT, 0)
            if given_BT.min() < 0:
                raise InputError(f"position_ids: {int(given_BT.min())} given, but a position is at least 0")
            length = int(given_BT.max()) + 1
        else:
            is_short = is_start and positions_BT.shape[1] <= (self.limit or 0)
            length = 0 if self.limit is None or is_short else int(positions_BT.max()) + 1
        if self.limit is not None and length > self.limit:
            raise InputError(
                f"n_positions: the text has {length} tokens, but this model reads at most {self.limit} (n_positions)"
            )


def check_tokens(name: str, tokens: Any, config: MultilinConfig) -> None:
    """Refuse input_ids that are not (B, T) ids of the vocabulary, and inputs_embeds that are not (B, T, D)."""
    is_ids = name == "input_ids"
    form = "(B, T) of token ids" if is_ids else f"(B, T, {config.hidden_size}) of embeddings"
    fits = isinstance(tokens, Tensor) and (tokens.dtype in (torch.int64, torch.int32)) == is_ids
    if not fits or not (tokens.ndim == 2 if is_ids else tokens.ndim == 3 and tokens.shape[-1] == config.hidden_size):
        raise InputError(f"{name}: {kind_of(tokens)} given, but it must be a tensor {form}")
    if is_ids:
        check_ids(tokens, config.vocab_size)


def check_ids(input_ids: Tensor, vocab_size: int) -> None:
    """Refuse ids outside the vocabulary."""
    # On a GPU the check would wait for the numbers, and a traced tensor has none.
    is_seen = type(input_ids) is Tensor and input_ids.device.type == "cpu" and can_read_values(input_ids)
    if is_seen and input_ids.numel():
        low, high = (int(x) for x in input_ids.aminmax())
        if low < 0 or high >= vocab_size:
            raise InputError(f"input_ids: {low if low < 0 else high} given, but ids are 0 to {vocab_size - 1}")


def hash_tokens(input_ids: Tensor, before_B: Tensor, counts_BT: Tensor | None = None) -> Tensor:
    """Polynomial hash of token ids, h <- HASH_FACTOR h + id + 1 modulo 2^63, the same for every split of the text.

    Args:
        input_ids: (B, T) int64 ids.
        before_B: (B,) int64 hash of the tokens before; 0 at the start of a text.
        counts_BT: (B, T) True for the tokens to hash; None for all.

    Returns:
        (B,) int64 hash after the last token.
    """
    num_time = input_ids.shape[1]
    if num_time == 1 and counts_BT is None:
        return (before_B * HASH_FACTOR + input_ids[:, 0] + 1) & HASH_MASK
    powers_T = torch.full((num_time + 1,), HASH_FACTOR, dtype=torch.long, device=input_ids.device)
    powers_T[0] = 1
    powers_T = powers_T.cumprod(dim=0)
    if counts_BT is None:
        hash_B = before_B * powers_T[num_time] + ((input_ids + 1) * powers_T[:num_time].flip(0)).sum(dim=1)
        return hash_B & HASH_MASK
    counts_BT = counts_BT.long()
    num_after_BT = counts_BT.flip(1).cumsum(dim=1).flip(1) - counts_BT
    terms_BT = (input_ids + 1) * counts_BT * powers_T[num_after_BT]
    return (before_B * powers_T[counts_BT.sum(dim=1)] + terms_BT.sum(dim=1)) & HASH_MASK


def _state_after(tokens: Tensor, layout: Layout, packing: Packing, before: EmbeddingState) -> EmbeddingState:
    """The state after the last token of each row."""
    num_time = tokens.shape[1]
    num_read_B, document_B, hash_B = before[:3]
    last_B1 = torch.full_like(num_read_B, num_time - 1)[:, None]
    is_empty_B = torch.zeros_like(num_read_B, dtype=torch.bool)
    if layout.padding_BT is not None:
        index_T = torch.arange(num_time, device=tokens.device)
        last_B1 = torch.where(layout.padding_BT, -1, index_T).amax(dim=1, keepdim=True)
        is_empty_B, last_B1 = last_B1[:, 0] < 0, last_B1.clamp(min=0)
    if packing.document_ids is not None:
        document_B = torch.where(is_empty_B, document_B, packing.document_ids.gather(1, last_B1)[:, 0])
    counts_BT = None if layout.padding_BT is None else ~layout.padding_BT
    if layout.starts_BT is not None:
        started_BT = layout.starts_BT.long().flip(1).cumsum(dim=1).flip(1) - layout.starts_BT.long() == 0
        counts_BT = started_BT if counts_BT is None else counts_BT & started_BT
        hash_B = torch.where(layout.starts_BT.any(dim=1), 0, hash_B)
    # Embeddings have no ids, so a text of embeddings is identified by its length only.
    ids_BT = tokens if tokens.ndim == 2 else torch.zeros_like(layout.positions_BT)
    hash_B = hash_tokens(ids_BT, hash_B, counts_BT)
    num_read_B = torch.where(is_empty_B, num_read_B, layout.positions_BT.gather(1, last_B1)[:, 0] + 1)
    return EmbeddingState(num_read_B, document_B, hash_B)
