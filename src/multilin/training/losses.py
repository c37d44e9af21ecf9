"""Scores causal language models: by loss and bits per byte on a text, and by accuracy on the answers of a task."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset
from transformers import PreTrainedModel

from multilin.data.packed_text import IGNORED_LABEL, Blocks, PackedText
from multilin.errors import InputError
from multilin.model.factory import evaluation_mode
from multilin.ops.threads import adapt


@dataclass(frozen=True)
class Evaluation:
    """A model's score on a text. The tokens that start documents are not scored."""

    loss: float  # mean nats per scored token
    perplexity: float  # exp(loss)
    bits_per_byte: float  # all nats / ln 2 / bytes
    tokens: int  # scored tokens
    bytes: int  # UTF-8 bytes of the text of the scored tokens


class Scored(NamedTuple):
    """The losses of N tokens.

    places: (N,) index of each token in the packed text.
    contexts: (N,) number of earlier tokens that the model read for each token, start token included; see `read_blocks`.
    losses: (N,) -ln p, float64.
    """

    places: NDArray[np.int64]
    contexts: NDArray[np.int64]
    losses: NDArray[np.float64]


def token_losses(model: PreTrainedModel, input_ids: Tensor, document_ids: Tensor) -> Tensor:
    """The loss -ln p of every token but the first, given the tokens before it in its row: (B, T - 1) float32.

    A method `token_losses` of the model, if there is one, computes the losses: it can keep packed documents apart and
    needs no memory for all logits. For any other model, this function turns logits into losses row by row.

    Args:
        model: a causal language model.
        input_ids: (B, T) tokens.
        document_ids: (B, T) for each token, the number of its document.
    """
    own = getattr(model, "token_losses", None)
    if own is not None:
        losses: Tensor = own(input_ids, document_ids if getattr(model, "packs", True) else None)
        return losses.float()
    logits = model(input_ids=input_ids, use_cache=False).logits
    rows = [
        F.cross_entropy(row[:-1].float(), ids[1:], reduction="none") for row, ids in zip(logits, input_ids, strict=True)
    ]
    return torch.stack(rows)


def evaluate(model: PreTrainedModel, packed: PackedText, **options: Any) -> Evaluation:
    """The score of a model on a packed text; arguments and errors are the same as for `read_blocks`.

    Raises:
        InputError: see `read_blocks`; or there is no token to score.
    """
    nats, tokens, counted = 0.0, 0, 0
    for part in read_blocks(model, packed, **options):
        nats += float(part.losses.sum())
        tokens += len(part.losses)
        counted += int(packed.token_sizes(packed.tokens[part.places]).sum())
    return summarise(nats, tokens, round(counted * packed.bytes_per_counted))


def read_blocks(
    model: PreTrainedModel,
    packed: PackedText,
    *,
    block_size: int,
    batch_size: int = 8,
    max_tokens: int | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> Iterator[Scored]:
    """Yield the losses of a packed text, a batch at a time; each block is read without the blocks before it.

    The context of a token is the earlier tokens of its document in the block. For a model that cannot separate packed
    documents, and for models of transformers, the context is all earlier tokens of the block.

    Args:
        model: a causal language model of transformers, on any device; training or evaluation mode is left as it was.
        packed: the text, packed with the model's tokenizer.
        block_size: tokens in a block. A block's first token is scored as the last token of the previous block.
        batch_size: blocks per call.
        max_tokens: score only evenly spaced blocks, with at least this many tokens in total; None scores all blocks.
        progress: called after each batch with the number of blocks read so far.

    Raises:
        InputError: the text's vocabulary is larger than the model's, or the block is too long for the model.
    """
    _check(model, packed, block_size)
    blocks = Blocks(packed, block_size, partial=True)
    chosen = chosen_blocks(len(blocks), block_size, max_tokens)
    device, done = next(model.parameters()).device, 0
    with evaluation_mode(model):
        for batch in DataLoader(Subset(blocks, chosen), batch_size):
            adapt()
            labels, documents = batch["labels"], batch["document_ids"]
            # Neither padding nor the start of a document is scored.
            is_scored = (labels[:, 1:] != IGNORED_LABEL) & (documents[:, 1:] == documents[:, :-1])
            with torch.inference_mode():
                losses = token_losses(model, batch["input_ids"].to(device), documents.to(device))
            first_B1 = np.array([blocks.span(index)[0] for index in chosen[done : done + len(is_scored)]])[:, None]
            places_BK = first_B1 + np.arange(1, block_size)
            begins_BK = packed.document_starts[documents[:, 1:].numpy()]
            contexts_BK = places_BK - np.maximum(begins_BK, first_B1)
            kept = is_scored.numpy()
            yield Scored(places_BK[kept], contexts_BK[kept], losses.cpu()[is_scored].double().numpy())
            done += len(is_scored)
            progress(done)


def _check(model: PreTrainedModel, packed: PackedText, block_size: int) -> None:
    if packed.description.vocab_size > model.config.vocab_size:
        raise InputError(
            f"the text was packed with a vocabulary of {packed.description.vocab_size} tokens, but the model has "
            f"{model.config.vocab_size}; pack it with the model's tokenizer"
        )
    longest = getattr(model.config, "max_position_embeddings", None)
    if longest is not None and block_size > longest:
        raise InputError(f"block_size: {block_size} given, but the model reads at most {longest} tokens")


def chosen_blocks(count: int, block_size: int, max_tokens: int | None) -> list[int]:
    """Evenly spaced indices of blocks, enough for `max_tokens` scored tokens; None takes all `count` blocks."""
    wanted = count if max_tokens is None else max(1, math.ceil(max_tokens / (block_size - 1)))
    if wanted >= count:
        return list(range(count))
    return [int(place) for place in np.linspace(0, count - 1, wanted).round()]


def summarise(nats: float, tokens: int, size: int) -> Evaluation:
    """The score of `tokens` tokens that encode `size` bytes and have a total loss of `nats`.

    Raises:
        InputError: there is no token to score.
    """
    if tokens == 0 or size == 0:
        raise InputError("there is no token to score: the text holds only start tokens")
    loss = nats / tokens
    perplexity = math.exp(loss) if loss < 700 else math.inf
    return Evaluation(loss, perplexity, nats / math.log(2) / size, tokens, size)


@dataclass(frozen=True)
class Answers:
    """A model's score on the answers of a synthetic task."""

    loss: float  # mean nats per token of an answer
    accuracy: float  # share of these tokens that get the model's highest probability


def score_answers(
    model: PreTrainedModel, sequences: Dataset[dict[str, Tensor]], *, number: int, batch_size: int = 32
) -> Answers:
    """Score a model on the answers in a task's first `number` sequences.

    Args:
        model: the model, on any device; training or evaluation mode is left as it was.
        sequences: items {"input_ids", "labels"}, (T,) each; labels are IGNORED_LABEL except in answers.
        number: number of sequences to score.
        batch_size: sequences per call.
    """
    device = next(model.parameters()).device
    nats, right, asked = 0.0, 0, 0
    with evaluation_mode(model):
        for batch in DataLoader(Subset(sequences, range(number)), batch_size):
            adapt()
            labels = batch["labels"][:, 1:].to(device)
            with torch.inference_mode():
                logits = model(input_ids=batch["input_ids"].to(device), use_cache=False).logits[:, :-1]
            scored = labels != IGNORED_LABEL
            chosen, answers = logits[scored].float(), labels[scored]
            nats += float(F.cross_entropy(chosen, answers, reduction="sum"))
            right += int((chosen.argmax(dim=-1) == answers).sum())
            asked += len(answers)
    return Answers(nats / asked, right / asked)
