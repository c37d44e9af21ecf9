"""Llama with choices that others of our models have, to see what a difference between models is made of.

With `unit_variance` every product is lin(W, x) = W x / sqrt(width of x), so that weights of unit variance keep the
variance of x, and the token embedding is drawn with a standard deviation of 1. Under AdamW without weight decay that is
Llama with weights of W / sqrt(width of x) whose learning rate is divided by sqrt(width of x), matrix by matrix, while
the embedding keeps the whole rate. With `output_bias: unigram` the log of the token counts is added to the logits.
"""

from typing import Any

from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from multilin.model.loss import FixedBiasLinear


class ScaledLlamaConfig(LlamaConfig):
    """Llama's fields, `unit_variance` and `output_bias`."""

    model_type = "multilin_llama"


class ScaledLlama(LlamaForCausalLM):
    """See the top of this file."""

    config_class = ScaledLlamaConfig

    def __init__(self, config: ScaledLlamaConfig) -> None:
        super().__init__(config)
        if config.output_bias == "unigram":
            self.lm_head = FixedBiasLinear(config.hidden_size, config.vocab_size)
        if config.unit_variance:
            for module in self.modules():
                if isinstance(module, nn.Linear):
                    module.register_forward_pre_hook(_scale_input)
            nn.init.normal_(self.get_input_embeddings().weight)
        self.post_init()

    def set_token_counts(self, counts: Tensor) -> None:
        """Fix the head's bias, where the config asks for one; (V,) how often each token occurs in the training text."""
        self.lm_head.set_counts(counts)


def _scale_input(module: nn.Linear, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return (inputs[0] * module.in_features**-0.5, *inputs[1:])


AutoConfig.register(ScaledLlamaConfig.model_type, ScaledLlamaConfig)
AutoModelForCausalLM.register(ScaledLlamaConfig, ScaledLlama)
