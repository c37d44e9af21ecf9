"""How often a causal language model answers right where a sequence asks."""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset
from transformers import PreTrainedModel

from multilin.data.packed_text import IGNORED_LABEL
from multilin.model.modes import evaluation_mode
from multilin.ops.threads import adapt


@dataclasses.dataclass(frozen=True)
class Answers:
    """A model's score on the asked tokens."""

    loss: float  # mean nats per asked token
    accuracy: float  # share of them that the model finds likeliest
    asked: int  # asked tokens


def score_answers(
    model: PreTrainedModel,
    sequences: Dataset[dict[str, Tensor]],
    *,
    number: int,
    batch_size: int = 32,
) -> Answers:
    """Score a model on the first `number` sequences.

    Args:
        model: on any device; its training mode is left as it was.
        sequences: items {"input_ids", "labels"}, (T,) each, the label a token where it is asked, else IGNORED_LABEL.
        number: sequences to score.
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
    return Answers(nats / asked, right / asked, asked)
