"""What the rule must know of a text and of this machine."""

import dataclasses

import torch

from multilin.analysis.costs import parameter_counts, training_flops_per_token
from multilin.data.prepared import PreparedText
from multilin.scoring.ngrams import ngram_bits_per_byte
from multilin.training.assemble import create_network
from multilin.training.recipe import Recipe

COUNTED_NGRAMS = 10**6


@dataclasses.dataclass(frozen=True)
class TextMeasure:
    """A text as the law sees it.

    train_tokens, train_bytes: of the training text. trigram: bits per byte of the validation text under an interpolated
    trigram model, counted from at most `COUNTED_NGRAMS` trigrams of the training text.
    """

    train_tokens: int
    train_bytes: int
    trigram: float


def measure_text(text: PreparedText) -> TextMeasure:
    """Measure a text in a few seconds, however large it is."""
    trigram = ngram_bits_per_byte(text.train, text.validation, 3, COUNTED_NGRAMS)
    return TextMeasure(text.train.num_tokens, text.train.num_bytes, round(trigram, 4))


def training_costs(recipe: Recipe, vocab_size: int) -> tuple[float, int]:
    """Floating-point operations of training on a token, and parameters outside embeddings and output projection."""
    with torch.random.fork_rng():
        model = create_network(recipe, vocab_size, None)
    total, in_embeddings = parameter_counts(model)
    return training_flops_per_token(model, recipe.model.n_positions), total - in_embeddings
