"""A model without training whose text shows what it has read."""

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase


def write_letters(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Let a model of additive attention write lower-case letters and spaces, which depend on all it has read."""
    letters = tokenizer.encode("abcdefghijklmnopqrstuvwxyz ", add_special_tokens=False)
    with torch.no_grad():
        model.lm_head.bias.fill_(-1e4)
        model.lm_head.bias[letters] = 0
        for parameter in model.model.layers.parameters():  # large, so that what was read decides what comes
            parameter.normal_()
