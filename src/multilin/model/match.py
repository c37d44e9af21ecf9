"""The longest match as a part of the embedding: the text so far, not the model, remembers what followed before."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from multilin.layers.base import Layout, ParameterHolder
from multilin.ops.longest_match import MatchState, longest_match
from multilin.settings import settings
from multilin.settings.bounds import Length, MatchLength


@settings
class Match:
    """The search for the longest match."""

    window: Length = 4096  # number of earlier tokens that are searched
    longest: MatchLength = 8  # number of last tokens that are compared at most


class Matches(NamedTuple):
    """The matches of some tokens, each (B, T) int64: the predicted ids, and the lengths, 0 without a match."""

    predicted_BT: Tensor
    length_BT: Tensor


def find_matches(model: nn.Module, ids_BT: Tensor) -> Matches | None:
    """The matches of whole texts, given as ids (B, T); None for a model without the longest match."""
    embedding = next((module for module in model.modules() if isinstance(module, MatchEmbedding)), None)
    return None if embedding is None else embedding.look_up(ids_BT, None, Layout(ids_BT, needs_state=False))[0]


class MatchEmbedding(ParameterHolder):
    """g[l] M[p] + N[l] for a match of length l that predicts token p. Without one, l and p are 0; g[0] begins at 0.

    Args:
        vocab_size, hidden_size: V and D.
        match: the search.
    """

    def __init__(self, vocab_size: int, hidden_size: int, match: Match) -> None:
        super().__init__()
        self.match = match
        self.predicted = nn.Embedding(vocab_size, hidden_size)  # M
        self.gate = nn.Parameter(torch.empty(match.longest + 1))  # g
        self.length = nn.Embedding(match.longest + 1, hidden_size)  # N

    def initialize(self, std: float) -> None:
        """Set all gates but the first to 1; the embeddings are drawn as every embedding."""
        nn.init.ones_(self.gate)
        nn.init.zeros_(self.gate[:1])

    def look_up(self, tokens: Tensor, state: MatchState | Any, layout: Layout) -> tuple[Matches, MatchState | None]:
        """The matches of ids (B, T), and the state after them. Embeddings (B, T, D) have no ids, so they match none."""
        ids_BT = tokens if tokens.ndim == 2 else torch.full_like(layout.positions_BT, -1)
        predicted_BT, length_BT, after = longest_match(
            ids_BT, window=self.match.window, longest=self.match.longest, starts=layout.starts_BT,
            padding=layout.padding_BT, state=state, needs_state=layout.needs_state,
        )  # fmt: skip
        return Matches(predicted_BT, length_BT), after

    def forward(self, matches: Matches) -> Tensor:
        """What is added to the embedding of each token, (B, T, D)."""
        predicted_BT, length_BT = matches
        return self.predicted(predicted_BT) * self.gate[length_BT][..., None] + self.length(length_BT)

    def resize(self, vocab_size: int) -> None:
        """Let M have as many rows as the token embedding; new rows begin at 0."""
        if self.predicted.num_embeddings != vocab_size:
            old = self.predicted.weight.data
            self.predicted = nn.Embedding(vocab_size, old.shape[1], dtype=old.dtype, device=old.device)
            self.predicted.weight.data.zero_()[: len(old)] = old[:vocab_size]
