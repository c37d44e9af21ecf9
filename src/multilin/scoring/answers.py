"""The accuracy of a causal language model on the answers of synthetic tasks."""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset
from transformers import PreTrainedModel

from multilin.data.packed_text import IGNORED_LABEL
from multilin.model.factory import evaluation_mode
from multilin.ops.threads import adapt


@dataclasses.dataclass(frozen=True)
class Answers:
    """A model's score on the answers."""

    loss: float  # mean nats per token of an answer
    accuracy: float  # share of these tokens that the model finds likeliest


def score_answers(
    model: PreTrainedModel, sequences: Dataset[dict[str, Tensor]], *, number: int, batch_size: int = 32
) -> Answers:
    """Score a model on the first `number` sequences.

    Args:
        model: the model, on any device; its training mode is left as it was.
        sequences: items {"input_ids", "labels"}, (T,) each; the label is the token in answers, else IGNORED_LABEL.
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
